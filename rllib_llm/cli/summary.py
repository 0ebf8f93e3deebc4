"""The closing table of a run: what `rllib-llm train` prints at its end, from the run's history."""

from __future__ import annotations

from collections.abc import Sequence

from rllib_llm.cli import table

REWARD = "env_runners/episode_return_mean"
TOKENS_PER_S = "env_runners/tokens_per_s"
EVAL_REWARD = "evaluation/env_runners/episode_return_mean"
REWARD_AT_START = "evaluation_at_start/env_runners/episode_return_mean"
REWARD_ERRORS = "env_runners/num_reward_errors_lifetime"
_LAST = 5  # iterations whose mean is called the last reward: one iteration's mean is noisy
_FEW = 10  # iterations before which a reward that has not risen says nothing: each has other problems

History = Sequence[dict[str, float]]


def closing_table(
    history: History,
    *,
    policy: str,
    fingerprint: str,
    run_id: str | None,
    tracking: str,
    checkpoint: str,
    status: str,
) -> str:
    """The table as text. Rows whose metric was never measured say so instead of vanishing."""
    return table.pairs(
        [
            ("result", f"{status} after {_duration(history)}"),
            ("reward", reward_text(history)),
            ("held-out reward", held_out_text(history)),
            *_too_few(history),
            ("sampling speed", _speed_text(history)),
            *_lost(history),
            ("mismatch k3", _spread(history, "mismatch/k3")),
            ("mismatch mean |Δlogp|", _spread(history, "mismatch/mean_abs")),
            ("mismatch max |Δlogp|", _spread(history, "mismatch/max_abs")),
            ("bit-equal tokens", _share(history, "mismatch/bit_equal_share")),
            ("policy", f"{policy} (fingerprint {fingerprint[:16]})"),
            ("MLflow run", f"{run_id or 'none'} ({tracking})"),
            ("checkpoint", checkpoint),
        ]
    )


def reward_text(history: History) -> str:
    """``0.412 → 0.903 (first iteration → mean of the last 5; best 0.921)``."""
    rewards = [row[REWARD] for row in history if REWARD in row]
    if not rewards:
        return "not measured"
    last = rewards[-_LAST:]
    mean = sum(last) / len(last)
    return f"{rewards[0]:.3f} → {mean:.3f} (first iteration → mean of the last {len(last)}; best {max(rewards):.3f})"


def held_out_text(history: History) -> str:
    """``0.477 → 0.742 (before training → iteration 60)``; without a first one from evaluation to evaluation."""
    measured = [
        *(("before training", row[REWARD_AT_START]) for row in history if REWARD_AT_START in row),
        *(
            (f"iteration {row['training_iteration']:.0f}", row[EVAL_REWARD])
            for row in history
            if EVAL_REWARD in row
        ),
    ]
    if not measured:
        return "not measured"
    (first, before), (last, after) = measured[0], measured[-1]
    if len(measured) == 1:
        return f"{before:.3f} ({first}, the only evaluation)"
    return f"{before:.3f} → {after:.3f} ({first} → {last})"


def _too_few(history: History) -> list[tuple[str, str]]:
    """A row that warns of reading a trend into a few iterations."""
    done = len([row for row in history if REWARD in row])
    if not 0 < done < _FEW:
        return []
    are = "iterations are" if done > 1 else "iteration is"
    return [("verdict", f"{done} {are} too few to tell whether it learns: {_FEW} or more are needed")]


def _duration(history: History) -> str:
    if not history:
        return "no iteration"
    seconds = sum(row.get("time_this_iter_s", 0.0) for row in history)
    minutes, rest = divmod(round(seconds), 60)
    return f"{int(history[-1]['training_iteration'])} iterations, {minutes} min {rest:02d} s of training"


def _lost(history: History) -> list[tuple[str, str]]:
    """A row of its own as soon as there is something to look into."""
    lost = max((row.get(REWARD_ERRORS, 0.0) for row in history), default=0.0)
    return [("lost to reward errors", f"{lost:.0f} samples")] if lost else []


def _speed_text(history: History) -> str:
    values = [row[TOKENS_PER_S] for row in history if TOKENS_PER_S in row]
    seconds = sum(row.get("time_this_iter_s", 0.0) for row in history)
    tokens = sum(row.get("learners/default_policy/num_tokens", 0.0) for row in history)
    if not values:
        return "not measured"
    whole = f"; {tokens / seconds:.0f} trained tokens/s of the whole loop" if tokens and seconds else ""
    return f"{sum(values) / len(values):.0f} tokens/s in one engine{whole}"


def _spread(history: History, key: str) -> str:
    values = [row[key] for row in history if key in row]
    if not values:
        return "not measured"
    return f"{sum(values) / len(values):.3g} (mean of iterations), {max(values):.3g} (largest)"


def _share(history: History, key: str) -> str:
    values = [row[key] for row in history if key in row]
    if not values:
        return "not measured"
    return (
        f"{100 * sum(values) / len(values):.6g} % (mean of iterations), {100 * min(values):.6g} % (smallest)"
    )

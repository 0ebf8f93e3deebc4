"""The one table of mismatch metrics: names, formulas, signs. docs/mismatch.md shows it and a test compares
the two.

Sign convention everywhere: D = train_logp - rollout_logp of the sampled token, rho = exp(D clamped to +-20).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

SIGN_CONVENTION = "Δ = train_logp − rollout_logp, of the sampled token; ρ = exp(clamp(Δ, −20, 20))"


@dataclass(frozen=True)
class Metric:
    """formula: over the n trained tokens with finite values on both sides. equal: its value when both sides
    are the same bits. absent: when the key is left out (never NaN). bucketed: also reported per bucket."""

    name: str
    formula: str
    equal: str
    absent: str = "n = 0"
    bucketed: bool = False


METRICS: tuple[Metric, ...] = (
    Metric("num_tokens", "n", "n", "never", True),
    Metric("nonfinite_tokens", "trained tokens dropped because either side is NaN or ±inf", "0", "never"),
    Metric("k1", "mean(−Δ): unbiased KL(rollout ‖ train), either sign", "0", bucketed=True),
    Metric("k2", "mean(Δ² / 2)", "0"),
    Metric("k3", "mean(ρ − 1 − log ρ): unbiased KL(rollout ‖ train), ≥ 0", "0", bucketed=True),
    Metric("mean_abs", "mean(|Δ|)", "0", bucketed=True),
    Metric("max_abs", "max(|Δ|)", "0", bucketed=True),
    Metric("p99_abs", "the ⌈0.99 n⌉-th smallest |Δ|", "0"),
    Metric("bit_equal_share", "share of tokens with train_logp = rollout_logp as fp32", "1", bucketed=True),
    Metric("train_higher_share", "share of tokens with Δ > 0", "0"),
    Metric(
        "pearson",
        "Pearson correlation of exp(train_logp) and exp(rollout_logp)",
        "1",
        "n < 2 or one side is constant",
    ),
    Metric(
        "ppl_ratio",
        "mean over responses of exp(−clamp(mean of Δ over the response, ±20)): train / rollout perplexity",
        "1",
    ),
    Metric("chi2", "mean(ρ²) − 1", "0"),
    Metric(
        "chi2_sequence",
        "mean over responses of exp(2 clamp(sum of Δ, ±20)) − 1",
        "0",
        "n = 0 or no sequence ids",
    ),
    Metric("ess", "(sum ρ)² / (n sum ρ²): effective share of the sample, in (0, 1]", "1"),
    Metric("multiplicative_error", "mean(exp(min(|Δ|, 20))), NeMo-RL's token_mult_prob_error", "1"),
)
BUCKETED = tuple(m.name for m in METRICS if m.bucketed)

POSITION_EDGES = (0, 32, 128, 512, 2048, 8192, 32768)
"""Lower edges of the buckets of a token's position among the trained tokens of its response."""
POSITION_BUCKETS = (
    *(f"{low}-{high - 1}" for low, high in pairwise(POSITION_EDGES)),
    f"{POSITION_EDGES[-1]}+",
)
PROBABILITY_BUCKETS = tuple(f"{i / 10:.1f}-{(i + 1) / 10:.1f}" for i in range(10))
"""Tenths of the rollout probability exp(rollout_logp); 1.0 belongs to the last."""

FAMILIES = {
    "by_position": "position among the response's trained tokens: " + ", ".join(POSITION_BUCKETS),
    "by_probability": "rollout probability of the token, in tenths: " + ", ".join(PROBABILITY_BUCKETS),
    "by_environment": "name of the environment the response came from (`MismatchMonitor`)",
}


def markdown_table() -> str:
    """The table as it stands in docs/mismatch.md."""
    rows = ["| name | definition | equal sides give | left out when | per bucket |", "|---|---|---|---|---|"]
    for m in METRICS:
        formula = m.formula.replace("|", "\\|")
        rows.append(f"| `{m.name}` | {formula} | {m.equal} | {m.absent} | {'yes' if m.bucketed else ''} |")
    return "\n".join(rows)

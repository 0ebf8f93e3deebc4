"""What an iteration says in words: a few prompts, completions and rewards, and the attestations of both sides.

`GRPO` puts these into its result (`report`); the MLflow callback, in Tune's process, takes them out again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_llm.algorithm.grpo import GRPO
    from rllib_llm.episode import TextEpisode

# Key of a result: tuple of {"prompt": …, "completion": …, "reward": …}. Tune's TensorBoard logger would try to make a
# histogram of a list, and print it all in a warning.
SAMPLES = "samples"
ATTESTATIONS = "attestations"  # key of a process's first result: {side: {key: value}}
SAMPLES_SHOWN = 8
MAX_CHARACTERS = 4000


def report(algorithm: GRPO, episodes: Sequence[TextEpisode], first: bool) -> dict[str, Any]:
    """Entries for the result of one iteration.

    episodes: those of the iteration, of which up to 8 are shown, evenly spread. first: whether the attestations that
    were compared when the runners got their first weights are given too.
    """
    out: dict[str, Any] = {SAMPLES: tuple(_rows(episodes, algorithm.settings.model.path))}
    if first:
        out[ATTESTATIONS] = algorithm.monitor.guard.get_state()["baseline"]
    return out


def samples_table(result: Mapping[str, Any], step: int) -> dict[str, list[Any]]:
    """Columns ``iteration``, ``prompt``, ``completion``, ``reward`` … of the samples in a result; empty without any."""
    rows: Sequence[Mapping[str, Any]] = result.get(SAMPLES) or ()
    if not rows:
        return {}
    columns: dict[str, list[Any]] = {"iteration": [step] * len(rows)}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name] = [row.get(name) for row in rows]
    return columns


def _rows(episodes: Sequence[TextEpisode], model: str) -> list[dict[str, Any]]:
    if not episodes:
        return []
    tokenizer = _tokenizer(model)
    count = min(SAMPLES_SHOWN, len(episodes))
    chosen = [episodes[i * len(episodes) // count] for i in range(count)]
    return [
        {
            "prompt": tokenizer.decode(e.prompt_ids.tolist())[-MAX_CHARACTERS:],
            "completion": tokenizer.decode(e.completion_ids.tolist())[:MAX_CHARACTERS],
            "reward": float(e.reward),
            "tokens": int(e.num_trained_tokens),
            "weights_version": int(e.weights_version),
        }
        for e in chosen
    ]


@functools.lru_cache(maxsize=2)
def _tokenizer(model: str) -> Any:
    from rllib_llm.models.checkpoint import load_tokenizer
    from rllib_llm.models.paths import resolve_model_path

    return load_tokenizer(resolve_model_path(model))

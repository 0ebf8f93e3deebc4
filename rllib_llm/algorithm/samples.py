"""What an iteration says in words: a few prompts, completions and rewards, and the attestations of both sides.

`GRPO` puts these into its result; the MLflow callback, in Tune's process, takes them out again (`tracking.samples`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rllib_llm.models.checkpoint import load_tokenizer
from rllib_llm.models.paths import resolve_model_path
from rllib_llm.tracking.samples import ATTESTATIONS, MAX_CHARACTERS, SAMPLES, SAMPLES_SHOWN

if TYPE_CHECKING:
    from rllib_llm.algorithm.grpo import GRPO
    from rllib_llm.rollout.episode import TextEpisode

__all__ = ["report"]


def report(algorithm: GRPO, episodes: Sequence[TextEpisode], first: bool) -> dict[str, Any]:
    """Entries for the result of one iteration.

    episodes: those of the iteration, of which up to 8 are shown, evenly spread. first: whether the attestations that
    were compared when the runners got their first weights are given too.
    """
    out: dict[str, Any] = {SAMPLES: tuple(_rows(episodes, algorithm.settings.model.path))}
    if first:
        out[ATTESTATIONS] = algorithm.monitor.guard.get_state()["baseline"]
    return out


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
    return load_tokenizer(resolve_model_path(model))

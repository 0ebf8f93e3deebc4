"""Embedded engines with the weights of a model, and what tests read from their answers."""

from __future__ import annotations

from typing import Any

from rllib_llm.engines import make_engine
from rllib_llm.sync.export import export_weights

VOCAB = 128
"""Ids of the `qwen3` model of `tests.models.cases`."""


def engine_of(model: Any, version: int = 1, **options: Any) -> Any:
    """The embedded engine with the model's weights as version `version`; options go to the engine."""
    engine = make_engine("torch", model.config, model.policy, **options)
    engine.update_weights(export_weights(model, version))
    return engine


class Letters:
    """A tokenizer whose token i is the i-th of 26 letters, repeated; ids above 100 are two letters each."""

    def decode(self, token_ids, **_):
        return "".join(
            chr(97 + i % 26) if i < 100 else chr(97 + i % 26) + chr(97 + (i + 7) % 26) for i in token_ids
        )


def ids_of(results) -> list[list[list[int]]]:
    return [[c.token_ids.tolist() for c in row] for row in results]

"""The settings `model.adapter` of a config that holds its sections as plain dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from precision_policies.coerce import build
from precision_policies.errors import Violation
from rllib_llm.errors import SettingsError
from rllib_llm.settings.groups import AdapterSettings

__all__ = ["read_adapter"]


def read_adapter(model: Mapping[str, Any]) -> AdapterSettings | None:
    """`adapter` of the section `model`; None where all weights are trained.

    Raises SettingsError with everything that is wrong with it.
    """
    data = model.get("adapter")
    if data is None:
        return None
    found: list[Violation] = []
    settings: AdapterSettings | None = build(AdapterSettings, data, "model.adapter", found)
    if found:
        raise SettingsError("model.adapter", found)
    return settings

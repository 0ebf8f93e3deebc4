"""What is kept of a trial's configuration: parameters, the policy in full, and the precision plan of the model."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllib_llm.settings.adapter import read_adapter
from rllib_llm.settings.names import dotted
from rllib_llm.tracking import entries


@dataclass
class TrialArtefacts:
    """Everything that is written once per trial.

    problems: one line per part that could not be made (an unreadable model directory, say); the rest is written.
    """

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def trial_artefacts(config: Mapping[str, Any], searched: Mapping[str, Any]) -> TrialArtefacts:
    """Parameters, tags and text artefacts of a Tune trial.

    config: the trial's whole config (RLlib's has some 300 entries; all of them go into config/trial.json).
    searched: the values that Tune chose; always parameters, whatever their defaults are.
    """
    out = TrialArtefacts()
    defaults = _rllib_defaults()
    telling = {
        key: value for key, value in config.items() if key not in defaults or not _same(value, defaults[key])
    }
    out.params = named_as_in_files(entries.params_of(telling))
    out.params.update(named_as_in_files(entries.params_of(searched)))
    out.texts["config/trial.json"] = json.dumps(entries.jsonable(dict(config)), indent=1)
    for part in (_add_policy, _add_plan):
        try:
            part(config, out)
        except Exception as error:  # a model or policy that cannot be read must not cost the run its record
            out.problems.append(f"{part.__name__.removeprefix('_add_')}: {type(error).__name__}: {error}")
    return out


def named_as_in_files(params: Mapping[str, str]) -> dict[str, str]:
    """Parameters with the name that a setting has in a YAML file where RLlib has another: `seed` is `run.seed`."""
    return {_in_files(key): value for key, value in params.items()}


def _in_files(key: str) -> str:
    first, dot, rest = key.partition(".")
    return f"{dotted(first)}{dot}{rest}"


def _add_policy(config: Mapping[str, Any], out: TrialArtefacts) -> None:
    policy = _policy(config)
    if policy is None:
        return
    out.tags.update({"policy.name": policy.name, "policy.fingerprint": policy.fingerprint})
    out.params.setdefault("policy", policy.name)
    out.texts["policy/policy.yaml"] = policy.to_yaml()


def _add_plan(config: Mapping[str, Any], out: TrialArtefacts) -> None:
    model = config.get("model") or {}
    policy, path, adapter = _policy(config), model.get("path"), read_adapter(model)
    if policy is None or path is None:
        return
    from rllib_llm.models.paths import resolve_model_path

    model_config = json.loads((resolve_model_path(path) / "config.json").read_text(encoding="utf-8"))
    plan = policy.resolve(model_config, None if adapter is None else adapter.spec())
    out.tags["policy.plan_hash"] = plan.hash
    out.texts["policy/plan.json"] = json.dumps(plan.to_dict(), indent=1)


def _policy(config: Mapping[str, Any]) -> Any:
    from precision_policies import load_policy

    chosen = (config.get("precision") or {}).get("policy")
    return None if chosen is None else load_policy(chosen)


@functools.cache
def _rllib_defaults() -> dict[str, Any]:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    return AlgorithmConfig().to_dict()


def _same(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError, RuntimeError):
        return False

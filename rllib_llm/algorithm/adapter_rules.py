"""What `model.adapter` must satisfy on the model and under the policy of a run."""

from __future__ import annotations

from collections.abc import Iterator

from precision_policies import AdapterSpec, PolicyError, load_policy
from precision_policies.errors import InputError, Violation
from rllib_llm.settings.groups import ModelSettings, PrecisionSettings

__all__ = ["adapter_violations"]


def adapter_violations(precision: PrecisionSettings, model: ModelSettings) -> Iterator[Violation]:
    """DoRA; targets that the model does not have; a PEFT directory with other adapters."""
    settings = model.adapter
    if settings is None:
        return
    if settings.use_dora:
        problem = (
            "DoRA divides by a norm of W + B A, which would have to be made from the codes at every step"
        )
        yield Violation("model.adapter.use_dora", True, problem, "leave it out; use_rslora is implemented")
    try:
        spec = settings.spec()
    except PolicyError as error:
        yield from _named(error)
        return
    yield from _on_the_model(precision, model, spec)
    if settings.path is not None:
        from rllib_llm.models.peft_files import PeftFilesError, read_spec

        try:
            there = read_spec(settings.path)
        except PeftFilesError as error:
            yield Violation("model.adapter.path", settings.path, str(error))
            return
        if (there.rank, there.scale) != (spec.rank, spec.scale):
            problem = f"holds adapters of rank {there.rank} and scale {there.scale:g}"
            rslora = str(there.use_rslora).lower()
            remedy = f"set rank: {there.rank}, alpha: {there.alpha:g}, use_rslora: {rslora}, and its target_modules"
            yield Violation("model.adapter.path", settings.path, problem, remedy)


def _on_the_model(
    precision: PrecisionSettings, model: ModelSettings, spec: AdapterSpec
) -> Iterator[Violation]:
    from rllib_llm.models.checkpoint import load_config
    from rllib_llm.models.paths import resolve_model_path

    try:
        policy, config = load_policy(precision.policy), load_config(resolve_model_path(model.path or ""))
        policy.resolve(config)
    except (InputError, OSError, ValueError):
        return  # said by other rules
    try:
        policy.resolve(config, spec)
    except PolicyError as error:
        yield from _named(error)


def _named(error: PolicyError) -> Iterator[Violation]:
    for v in error.violations:
        yield Violation(f"model.{v.key}", v.value, v.problem, v.remedy)

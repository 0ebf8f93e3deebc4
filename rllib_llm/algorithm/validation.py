"""Every rule that a GRPOConfig must satisfy before anything is built.

A rule names the settings that it reads; where one of these is itself malformed the rule is skipped, as it would speak
of a default that nobody chose. So one error lists malformed values and impossible combinations together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precision_policies import PolicyError, load_policy
from precision_policies.coerce import convert
from precision_policies.errors import MISSING, InputError, Violation
from rllib_llm.algorithm.adapter_rules import adapter_violations
from rllib_llm.algorithm.engine_rules import engine_violations, model_limit_violations
from rllib_llm.algorithm.rllib_settings import rllib_violations
from rllib_llm.losses.chosen import loss_violations, reward_violations, sampling_violations
from rllib_llm.settings.groups import GROUPS, ModelSettings, PrecisionSettings, RolloutSettings, TrainSettings
from rllib_llm.settings.names import ATTRIBUTES, all_keys
from rllib_llm.settings.read import read

if TYPE_CHECKING:
    from rllib_llm.algorithm.config import GRPOConfig

__all__ = ["config_violations", "section_violations"]


@dataclass(frozen=True)
class _Draft:
    """What is checked: the sections, with defaults in the place of malformed values."""

    precision: PrecisionSettings
    model: ModelSettings
    rollout: RolloutSettings
    train: TrainSettings
    num_learners: int
    num_env_runners: int
    learners_on_gpu: bool = False


_Rule = Callable[[_Draft], Iterator[Violation]]
_RULES: list[tuple[frozenset[str], _Rule]] = []


def _rule(*reads: str) -> Callable[[_Rule], _Rule]:
    def register(rule: _Rule) -> _Rule:
        _RULES.append((frozenset(reads), rule))
        return rule

    return register


def config_violations(config: GRPOConfig) -> list[Violation]:
    """All violations, in the order a reader would fix them: names, types and ranges, combinations."""
    found = list(rllib_violations(config))
    malformed: set[str] = set()
    parts: dict[str, Any] = {
        name: read(cls, vars(config)[name], name, found, malformed) for name, cls in GROUPS.items()
    }
    found += _attributes(config, malformed)
    if config.in_evaluation:
        malformed.add("run.resources.num_env_runners")  # RLlib counts those of the evaluation there
    if not malformed & {"rollout.eval_samples", "evaluation.num_env_runners"}:
        found += _evaluation(config, parts["rollout"].eval_samples)
    return found + section_violations(
        **parts,
        num_learners=config.num_learners,
        num_env_runners=config.num_env_runners,
        malformed=malformed,
        learners_on_gpu="run.resources.gpus_per_learner" not in malformed and config.num_gpus_per_learner > 0,
    )


def section_violations(
    precision: PrecisionSettings,
    model: ModelSettings,
    rollout: RolloutSettings,
    train: TrainSettings,
    num_learners: int,
    num_env_runners: int,
    malformed: Collection[str] = (),
    learners_on_gpu: bool = False,
) -> list[Violation]:
    """Combinations of settings that cannot be; needs neither Ray nor RLlib. malformed: settings no rule may read."""
    draft = _Draft(precision, model, rollout, train, num_learners, num_env_runners, learners_on_gpu)
    return [v for reads, rule in _RULES if reads.isdisjoint(malformed) for v in rule(draft)]


# RLlib's own values that the setting of a file does not have.
_ALSO: dict[str, tuple[object, ...]] = {"run.seed": (None,), "run.resources.cpus_per_learner": ("auto",)}


def _attributes(config: GRPOConfig, malformed: set[str]) -> list[Violation]:
    """Types and ranges of the settings that RLlib keeps as attributes; it takes most of them as they are."""
    found: list[Violation] = []
    for name, attribute in ATTRIBUTES.items():
        key, value, wrong = all_keys()[name], getattr(config, attribute), list[Violation]()
        if name in malformed or name == "env.name" or value in _ALSO.get(name, ()):
            continue  # an environment may be a class or a function, too
        convert(key.hint, value, name, key.metadata, wrong)
        if wrong:
            malformed.add(name)
            found += wrong
    return found


def _evaluation(config: GRPOConfig, samples: int) -> Iterator[Violation]:
    """RLlib's settings of the evaluation that depend on others."""
    if not config.explore and not config.in_evaluation:
        problem = "greedy answers of one group are all equal, there is nothing to learn from them"
        yield Violation(
            "explore", False, problem, "leave it True; rollout.eval_temperature = 0 evaluates greedily"
        )
    if config.evaluation_config and not config.evaluation_num_env_runners:
        remedy = "set evaluation.num_env_runners >= 1, or rollout.eval_temperature and rollout.eval_samples"
        problem = "has no effect without evaluation runners of its own"
        yield Violation("evaluation_config", config.evaluation_config, problem, remedy)
    unit = config.evaluation_duration_unit
    if unit == "episodes" and samples > 1:
        problem = (
            f"evaluation.prompts counts prompts, and each is answered rollout.eval_samples = {samples} times"
        )
        yield Violation("evaluation_duration_unit", unit, problem, "leave it out ('prompts')")
    elif unit not in ("prompts", "episodes"):
        problem = "has no effect here: evaluation.prompts counts prompts"
        yield Violation("evaluation_duration_unit", unit, problem, "leave it out ('prompts')")


@_rule("model.path")
def _model(draft: _Draft) -> Iterator[Violation]:
    if draft.model.path is None:
        remedy = "choose one with .model('tiny-chain') or .model('/path/to/hf_model'); in a file, model: tiny-chain"
        yield Violation("model.path", None, "is not set", remedy)
    else:
        yield from _unreadable("model.path", draft.model.path)


@_rule("precision.policy", "model.path", "model.adapter")
def _adapter(draft: _Draft) -> Iterator[Violation]:
    yield from adapter_violations(draft.precision, draft.model)


@_rule("model.reference_path")
def _reference_model(draft: _Draft) -> Iterator[Violation]:
    if draft.model.reference_path is not None:
        yield from _unreadable("model.reference_path", draft.model.reference_path)


def _unreadable(key: str, path: str) -> Iterator[Violation]:
    from rllib_llm.models.paths import resolve_model_path

    try:
        resolve_model_path(path)
    except (FileNotFoundError, ValueError) as error:
        yield Violation(key, path, str(error))


@_rule("model.reference_path", "train.kl_coeff")
def _reference(draft: _Draft) -> Iterator[Violation]:
    if draft.model.reference_path is not None and draft.train.kl_coeff == 0.0:
        problem = "has no effect with train.kl_coeff = 0"
        yield Violation(
            "model.reference_path",
            draft.model.reference_path,
            problem,
            "set the weight of the KL to that model",
        )


@_rule("precision.policy", "precision.allow_precision_change", "model.path")
def _registered_policy(draft: _Draft) -> Iterator[Violation]:
    """A registered model may not be trained on, and so sampled from, under a policy other than its own."""
    from rllib_llm.models.paths import resolve_model_path
    from rllib_llm.on_disk.owner import refuse_other_policy

    try:
        policy, path = load_policy(draft.precision.policy), resolve_model_path(draft.model.path or "")
    except (InputError, OSError, ValueError):
        return  # said by other rules
    override = "set precision.allow_precision_change = true"
    try:
        refuse_other_policy(path, policy, draft.precision.allow_precision_change, override=override)
    except InputError as error:
        yield Violation("model.path", MISSING, str(error))


@_rule("precision.policy")
def _policy(draft: _Draft) -> Iterator[Violation]:
    try:
        load_policy(draft.precision.policy)
    except PolicyError as error:
        for v in error.violations:
            key = "precision.policy" if v.key == "policy" else f"precision.policy.{v.key}"
            yield Violation(key, v.value, v.problem, v.remedy)
    except OSError as error:
        yield Violation("precision.policy", draft.precision.policy, f"cannot be read: {error}")


@_rule("precision.policy", "rollout.top_p", "rollout.top_k")
def _truncation(draft: _Draft) -> Iterator[Violation]:
    try:
        policy = load_policy(draft.precision.policy)
    except (PolicyError, OSError):
        return  # said by `_policy`
    if policy.logprobs.truncation != "refuse":
        return
    for name, off in (("top_p", 1.0), ("top_k", 0)):
        if (value := getattr(draft.rollout, name)) != off:
            problem = f"policy {policy.name!r} has logprobs.truncation = 'refuse'"
            remedy = f"set {off:g}: sample from the whole distribution, or use a policy that renormalises"
            yield Violation(f"rollout.{name}", value, problem, remedy)


@_rule("rollout.min_new_tokens", "rollout.max_new_tokens")
def _shortest(draft: _Draft) -> Iterator[Violation]:
    rollout = draft.rollout
    if rollout.min_new_tokens > rollout.max_new_tokens:
        problem = f"is above rollout.max_new_tokens = {rollout.max_new_tokens}"
        yield Violation("rollout.min_new_tokens", rollout.min_new_tokens, problem, "lower it")


@_rule("rollout.min_new_tokens", "rollout.max_turns")
def _turns(draft: _Draft) -> Iterator[Violation]:
    rollout = draft.rollout
    if rollout.min_new_tokens and rollout.max_turns > 1:
        problem = (
            f"with rollout.max_turns = {rollout.max_turns} the learner cannot tell where an answer begins when an "
            "environment adds nothing between two"
        )
        yield Violation("rollout.min_new_tokens", rollout.min_new_tokens, problem, "use one of the two")


_COLDEST = 0.01
"""vLLM samples at this temperature where it is asked for a lower one; the learner would score another distribution."""


@_rule("rollout.temperature", "rollout.eval_temperature")
def _coldest(draft: _Draft) -> Iterator[Violation]:
    for key, value in (
        ("rollout.temperature", draft.rollout.temperature),
        ("rollout.eval_temperature", draft.rollout.eval_temperature),
    ):
        if 0.0 < value < _COLDEST:
            problem = (
                f"is below {_COLDEST}: divided by it, logits overflow, and every answer is the greedy one"
            )
            yield Violation(
                key, value, problem, "greedy evaluation is rollout.eval_temperature = 0; sample warmer"
            )


@_rule("rollout.stop")
def _stop_texts(draft: _Draft) -> Iterator[Violation]:
    if "" in draft.rollout.stop:
        problem = "holds an empty text, which every answer contains before its first token"
        yield Violation("rollout.stop", list(draft.rollout.stop), problem, "leave it out")


@_rule("train.lr", "train.weight_decay")
def _step_sizes(draft: _Draft) -> Iterator[Violation]:
    lr = draft.train.lr
    highest = max((rate for _, rate in lr), default=0.0) if isinstance(lr, tuple) else lr
    if highest > 1.0:
        problem = "is above 1, and a step of AdamW changes every weight by about the learning rate"
        yield Violation("train.lr", lr, problem, "language models are trained with 1e-7 to 1e-3")
    elif highest * draft.train.weight_decay >= 1.0:
        problem = f"times train.lr = {highest:g} is 1 or more: one step would take the weights away"
        yield Violation("train.weight_decay", draft.train.weight_decay, problem, "0 to 0.1 is usual")


@_rule("rollout.eval_temperature", "rollout.eval_samples")
def _evaluation_answers(draft: _Draft) -> Iterator[Violation]:
    if draft.rollout.eval_temperature == 0.0 and draft.rollout.eval_samples > 1:
        problem = "with rollout.eval_temperature = 0 it would repeat one greedy answer"
        remedy = "set rollout.eval_temperature above 0, or 1 sample"
        yield Violation("rollout.eval_samples", draft.rollout.eval_samples, problem, remedy)


@_rule("rollout.engine", "rollout.engine_options", "rollout.sleep_while_learning", "rollout.weight_transport")
def _engine(draft: _Draft) -> Iterator[Violation]:
    yield from engine_violations(draft.rollout)


@_rule("model.path", "model.max_sequence_length", "rollout.stop_token_ids", "rollout.engine_options")
def _model_limits(draft: _Draft) -> Iterator[Violation]:
    yield from model_limit_violations(draft.model, draft.rollout, draft.learners_on_gpu)


@_rule(
    *(
        "train.loss",
        "train.loss_config",
        "train.clip_low",
        "train.clip_high",
        "train.kl_coeff",
        "train.kl_in",
    ),
    *("train.kl_estimator", "train.entropy_coeff", "rollout.max_new_tokens", "rollout.max_turns"),
)
def _loss(draft: _Draft) -> Iterator[Violation]:
    yield from loss_violations(draft.train, draft.rollout)


@_rule("train.loss", "train.advantages", "train.correction", "rollout.group_size")
def _rewards(draft: _Draft) -> Iterator[Violation]:
    yield from reward_violations(draft.train, draft.rollout)


@_rule("train.dynamic_sampling", "train.max_sample_rounds", "rollout.group_size")
def _dynamic_sampling(draft: _Draft) -> Iterator[Violation]:
    yield from sampling_violations(draft.train, draft.rollout)


@_rule("train.minibatches_per_epoch", "rollout.prompts_per_iteration", "rollout.group_size")
def _minibatches(draft: _Draft) -> Iterator[Violation]:
    prompts, group = draft.rollout.prompts_per_iteration, draft.rollout.group_size
    steps = draft.train.minibatches_per_epoch
    if prompts * group % steps:
        problem = (
            f"must divide rollout.prompts_per_iteration x rollout.group_size = {prompts} x {group} = "
            f"{prompts * group}, or steps would weigh samples unequally"
        )
        yield Violation("train.minibatches_per_epoch", steps, problem, "choose a divisor")


@_rule(
    *("train.minibatches_per_epoch", "rollout.prompts_per_iteration", "rollout.group_size"),
    "run.resources.num_learners",
)
def _learners_have_work(draft: _Draft) -> Iterator[Violation]:
    samples = draft.rollout.prompts_per_iteration * draft.rollout.group_size
    learners, steps = max(1, draft.num_learners), draft.train.minibatches_per_epoch
    if samples < learners * steps:
        problem = (
            f"{samples} samples per iteration cannot feed num_learners = {learners} x {steps} minibatches "
            "(train.minibatches_per_epoch)"
        )
        yield Violation("run.resources.num_learners", draft.num_learners, problem, "use fewer")


@_rule("run.resources.num_env_runners", "rollout.prompts_per_iteration")
def _runners_have_work(draft: _Draft) -> Iterator[Violation]:
    runners, prompts = draft.num_env_runners, draft.rollout.prompts_per_iteration
    if runners > prompts:
        problem = f"exceeds rollout.prompts_per_iteration = {prompts}: some runners would never sample"
        yield Violation("run.resources.num_env_runners", runners, problem, "use fewer")


@_rule("train.overlong_buffer", "rollout.max_new_tokens")
def _overlong(draft: _Draft) -> Iterator[Violation]:
    if draft.train.overlong_buffer > draft.rollout.max_new_tokens:
        problem = f"is above rollout.max_new_tokens = {draft.rollout.max_new_tokens}"
        yield Violation("train.overlong_buffer", draft.train.overlong_buffer, problem, "lower it")


@_rule("train.lr_decay", "train.total_steps")
def _decay(draft: _Draft) -> Iterator[Violation]:
    decay, steps = draft.train.lr_decay, draft.train.total_steps
    if (decay == "constant") != (steps is None):
        problem = f"with train.lr_decay = {decay!r}"
        remedy = "a decay needs the number of optimiser steps at which it ends, 'constant' takes none (null)"
        yield Violation("train.total_steps", steps, problem, remedy)

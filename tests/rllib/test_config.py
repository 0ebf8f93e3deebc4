"""GRPOConfig: fluent groups, refusals that name everything, and Tune dicts."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rllib_llm import GRPO, DAPOConfig, DrGRPOConfig, GRPOConfig, GSPOConfig, ReinforcePPConfig, RLOOConfig
from rllib_llm.algorithm.rllib_settings import HAS_EFFECT, WITHOUT_EFFECT
from rllib_llm.algorithm.validation import config_violations
from rllib_llm.errors import SettingsError
from rllib_llm.settings.groups import GROUPS

Make = Callable[..., Any]


def problems(config: GRPOConfig) -> str:
    with pytest.raises(ValueError, match="problem") as error:
        config.validate()
    return str(error.value)


def test_model_is_a_fluent_group_and_still_rllibs_dict(toy_model: str) -> None:
    """`config.model(path)` works although AlgorithmConfig stores a dict under the instance attribute `model`."""
    config = GRPOConfig().model(toy_model, gradient_checkpointing=True)
    assert config.model["path"] == toy_model
    assert config.model["gradient_checkpointing"] is True
    assert config.model["custom_model"] is None, "RLlib's validation reads the legacy dict"
    assert vars(config)["model"] == config.to_dict()["model"] == dict(config.model)


def test_a_config_survives_every_way_rllib_copies_it(toy_config: Make) -> None:
    """copy, pickle, get_state/from_state and to_dict/update_from_dict give the same settings."""
    config = toy_config("mixed-bf16-fp8", temperature=0.7).training(loss="dapo", betas=(0.8, 0.9))
    copies = [
        config.copy(),
        copy.deepcopy(config),
        pickle.loads(pickle.dumps(config)),
        GRPOConfig.from_state(config.get_state()),
        GRPOConfig().update_from_dict(config.to_dict()),
    ]
    for other in copies:
        other.validate()
        assert other.settings() == config.settings()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"rollout/temperature": 0.5}, "rollout.temperature"),
        ({"rollout.temperature": 0.5}, "rollout.temperature"),
        ({"rollout/temperature": 0.5, "rollout": {"temperature": 0.9}}, "rollout.temperature"),
        ({"train/clip_high": 0.5}, "train.clip_high"),
        ({"train": {"lr": 0.5}}, "train.lr"),
        ({"precision/policy": "bf16"}, "policy.name"),
        ({"precision": "bf16"}, "policy.name"),
    ],
)
def test_tune_dicts_reach_nested_keys_and_leave_the_others(
    toy_config: Make, change: dict, expected: str
) -> None:
    """A partial nested dict, a slash key and a fluent name all change one setting and keep the rest of its group."""
    before = toy_config()
    after = toy_config().update_from_dict(change).settings()
    group, name = expected.split(".")
    assert getattr(getattr(after, group), name) in (0.5, "bf16")
    assert after.rollout.group_size == before.rollout["group_size"]
    assert after.model == before.settings().model


def test_model_by_dict(toy_model: str) -> None:
    """{"model": path} and {"model": {"path": path}} are one setting."""
    config = GRPOConfig().update_from_dict({"model": toy_model})
    assert config.model["path"] == toy_model
    assert GRPOConfig().update_from_dict({"model": {"path": toy_model}}).model["path"] == toy_model
    assert GRPOConfig().update_from_dict(GRPOConfig().to_dict()).model["path"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: setattr(c, "rolout", {}), "rolout = {}: no such setting -> closest: rollout"),
        (lambda c: c.update_from_dict({"lerning_rate": 1}), "lerning_rate = 1: no such setting -> closest: train.lr"),
        (lambda c: c.update_from_dict({"rollout/temprature": 1}), "temprature = 1: no such setting -> closest"),
        (lambda c: c.update_from_dict({"train/clip_hihg": 1}), "train.clip_hihg = 1: no such setting -> closest: "),
        (lambda c: c.rollout(group_size="8"), "rollout.group_size = '8': is not a whole number"),
        (lambda c: c.rollout(group_size=True), "rollout.group_size = True: is not a whole number"),
        (
            lambda c: c.rollout(engine="vllm", engine_options={"device": "cpu"}, sleep_while_learning=True),
            "vLLM on a CPU cannot give memory back",
        ),
        (
            lambda c: c.rollout(engine_options={"device": "cpu"}, weight_transport="nccl"),
            "rollout.weight_transport = 'nccl': with",
        ),
        (lambda c: c.rollout(weight_transport="ipc"), "use one of auto | cuda_ipc | nccl | gloo"),
        (lambda c: c.rollout(group_size=1), "compare the answers to one prompt"),
        (lambda c: c.rollout(temperature=0.0), "must be > 0"),
        (lambda c: c.rollout(top_p=0.0), "rollout.top_p = 0.0: out of range -> must be > 0, <= 1"),
        (lambda c: c.rollout(min_new_tokens=9), "is above rollout.max_new_tokens = 4"),
        (lambda c: c.rollout(min_new_tokens=2, max_turns=2), "cannot tell where an answer begins"),
        (lambda c: c.rollout(eval_samples=4), "repeat one greedy answer"),
        (lambda c: c.rollout(prompts_per_iteration=5).training(minibatches_per_epoch=3), "must divide"),
        (lambda c: c.training(loss="gpro"), "train.loss = 'gpro': no such loss (did you mean"),
        (lambda c: c.training(clip_low=2.0), "clip_low = 2.0"),
        (lambda c: c.training(loss_config={"dual": 3}), "no such setting"),
        (lambda c: c.training(advantages="z"), "train.advantages = 'z': no such kind"),
        (lambda c: c.training(correction={"kind": "tis"}), "train.correction.kind = 'tis': not allowed"),
        (lambda c: c.training(lr_decay="linear"), "a decay needs the number of optimiser steps"),
        (lambda c: c.training(betas=(0.9, 1.0)), "train.betas[1] = 1.0: out of range -> must be >= 0, < 1"),
        (lambda c: c.training(minibatch_size=4), "minibatch_size = 4: has no effect here -> use train.mini"),
        (lambda c: c.training(train_batch_size=64), "use rollout.prompts_per_iteration and rollout.group_size"),
        (lambda c: c.training(grad_clip_by="value"), "grad_clip_by = 'value': has no effect here"),
        (lambda c: c.training(overlong_buffer=99), "train.overlong_buffer = 99"),
        (lambda c: c.env_runners(num_env_runners=9), "some runners would never sample"),
        (lambda c: c.learners(num_learners=17), "cannot feed num_learners = 17"),
        (lambda c: c.learners(num_learners="2"), "run.resources.num_learners = '2': is not a whole number"),
        (lambda c: c.env_runners(num_env_runners=1.5), "run.resources.num_env_runners = 1.5: is not a whole number"),
        (lambda c: c.training(num_epochs=1.5), "train.num_epochs = 1.5: is not a whole number"),
        (lambda c: c.training(lr=[1, 2]), "train.lr = [1, 2]: is not a list of lists of 2 numbers"),
        (lambda c: c.rollout(engine_options={"device": "cdua"}), "device = 'cdua': no such device -> use cpu"),
        (lambda c: c.rollout(max_new_tokens=10**23), "choose from 1 to 2147483647"),
        (lambda c: c.rollout(stop_token_ids=[1, 10**9]), "stop_token_ids = [1000000000]: must be from 0 to"),
        (lambda c: c.model(c.model["path"], max_sequence_length=10**9), "max_position_embeddings"),
        (lambda c: c.rollout(engine="torhc"), "engine = 'torhc': no such engine (did you mean 'torch'?)"),
        (
            lambda c: c.rollout(engine_options={"max_num_seq": 3}),
            "engine_options.max_num_seq = 3: engine 'torch' has no such option (did you mean 'max_num_seqs'?)",
        ),
        (lambda c: c.precision("unified-fp9"), "policy = 'unified-fp9': no such policy (did you mean"),
        (lambda c: c.model("/no/such/model"), "model.path = '/no/such/model'"),
        (lambda c: setattr(c, "evaluation_parallel_to_training", True), "sequential evaluation"),
        (lambda c: c.evaluation(evaluation_config={"explore": False}), "without evaluation runners of its own"),
        (lambda c: c.env_runners(explore=False), "explore = False"),
        (lambda c: c.training(gamma=1.0), "gamma = 1.0: has no effect here"),
    ],
)  # fmt: skip
def test_refusals_name_the_key_and_the_remedy(
    toy_config: Make, change: Callable[[Any], Any], said: str
) -> None:
    """Each wrong setting is refused at validation, with its key, its value and what to do."""
    config = toy_config()
    config.validate()
    change(config)
    assert said in problems(config)


def test_all_violations_are_listed_at_once(toy_config: Make) -> None:
    """One error shows every problem, RLlib's own included."""
    config = toy_config(group_size=0, temperature=-1.0).training(betas=(2.0, 0.5)).precision("nope")
    config.nonsense = 1
    config.evaluation_duration = -3
    text = problems(config)
    for part in ("group_size", "temperature", "betas", "nope", "nonsense", "evaluation_duration"):
        assert part in text, part


def test_an_ill_typed_setting_hides_no_other_problem(toy_config: Make) -> None:
    """Values are checked although another has a wrong type; nothing is said about the default of that one."""
    config = toy_config(group_size="4", temperature=-1.0).precision("nope")
    config.update_from_dict({"train/clip_hihg": 1.0}).training(minibatches_per_epoch=0)
    text = problems(config)
    for part in (
        "group_size = '4': is not a whole number",
        "temperature = -1.0",
        "nope",
        "clip_hihg",
        "minibatches_per_epoch = 0",
    ):
        assert part in text, part
    config = toy_config(group_size="4").training(minibatches_per_epoch=5)
    assert problems(config).count("group_size") == 1


def test_a_path_is_required() -> None:
    """Without a model the error says how to set one."""
    assert ".model('tiny-chain')" in problems(GRPOConfig())


@pytest.mark.parametrize(
    ("group", "name"),
    [
        ("rollout", "temprature"),
        ("training", "clip_hihg"),
        ("training", "minibatches_per_epohc"),
        ("model", "pth"),
        ("precision", "polcy"),
    ],
)
def test_fluent_groups_refuse_unknown_arguments_at_once(toy_config: Make, group: str, name: str) -> None:
    """A misspelt argument is an error of the call itself, with the closest name."""
    with pytest.raises(ValueError, match="closest") as error:
        getattr(toy_config(), group)(**{name: 1})
    assert name in str(error.value)


def test_subclasses_may_add_settings(toy_model: str) -> None:
    """RLlib's idiom for own settings, attributes set in a subclass's __init__, is not mistaken for a typo."""

    class Mine(GRPOConfig):
        def __init__(self, algo_class: type | None = None):
            super().__init__(algo_class)
            self.my_setting = 3

    Mine().model(toy_model).environment("tests.rllib.toy:CopyDigit").validate()


def test_policy_file_is_replaced_by_its_content(toy_config: Make, tmp_path: Any) -> None:
    """After validation the config carries the policy itself: other machines need not have the file."""
    from precision_policies import load_policy

    file = tmp_path / "mine.yaml"
    file.write_text("schema_version: 1\nextends: bf16\nname: mine\n")
    config = toy_config(str(file))
    config.validate()
    file.unlink()
    assert config.settings().policy.fingerprint == load_policy("bf16").fingerprint


@pytest.mark.parametrize(
    ("cls", "loss"),
    [
        (DrGRPOConfig, "dr_grpo"),
        (DAPOConfig, "dapo"),
        (GSPOConfig, "gspo"),
        (RLOOConfig, "rloo"),
        (ReinforcePPConfig, "reinforce++"),
    ],
)
def test_relatives_differ_from_grpo_only_in_what_their_paper_changes(
    cls: type, loss: str, toy_model: str
) -> None:
    """A relative's config is valid, names its loss, and survives Tune's dict round trip."""
    config = cls().model(toy_model).environment("tests.rllib.toy:CopyDigit")
    config.validate()
    assert config.train["loss"] == loss
    assert GRPOConfig().update_from_dict(config.to_dict()).settings() == config.settings()
    changed = {k for k, v in GRPOConfig().train.items() if config.train[k] != v}
    assert changed <= {"loss", "dynamic_sampling"}


def test_resources_count_every_process(toy_config: Make, ray_session: Any) -> None:
    """Tune reserves the driver, each env runner, each evaluation runner and each learner: nothing waits for ever."""
    config = toy_config().env_runners(num_env_runners=2).learners(num_learners=2)
    config.evaluation(evaluation_num_env_runners=1, evaluation_interval=1)
    assert len(GRPO.default_resource_request(config.to_dict()).bundles) == 1 + 2 + 1 + 2
    config.evaluation(evaluation_num_env_runners=0)
    assert len(GRPO.default_resource_request(config.to_dict()).bundles) == 1 + 2 + 2, (
        "no own evaluation runners"
    )


@pytest.mark.parametrize(
    ("set_it", "said"),
    [
        (lambda c: c.training(lr=-1.0), "train.lr = -1.0: out of range"),
        (lambda c: c.training(lr=-1), "train.lr = -1.0: out of range"),
        (lambda c: setattr(c, "lr", -1.0), "train.lr = -1.0: out of range"),
        (lambda c: c.debugging(seed=-1), "run.seed = -1: out of range"),
        (lambda c: c.training(gamma=-1), "gamma = -1: has no effect here"),
        (lambda c: c.env_runners(num_env_runners=-1), "run.resources.num_env_runners = -1: out of range"),
        (lambda c: c.training(grad_clip=-1.0), "train.grad_clip = -1.0: out of range"),
        (lambda c: c.rollout(top_k=-1), "rollout.top_k = -1: out of range"),
    ],
)
def test_minus_one_reaches_validation(toy_config: Make, set_it: Callable[[Any], Any], said: str) -> None:
    """RLlib's get_state leaves out every -1; a run must not train with the default in its place."""
    config = toy_config()
    set_it(config)
    for other in (
        config,
        GRPOConfig.from_state(config.get_state()),
        GRPOConfig().update_from_dict(config.to_dict()),
    ):
        assert said in problems(other)
    with pytest.raises(SettingsError):
        config.build_algo()


def test_every_setting_of_rllib_is_obeyed_or_refused() -> None:
    """Each attribute of RLlib's config stands in one table: none can be accepted and passed over."""
    attributes = set(vars(AlgorithmConfig())) - {"lr", "grad_clip", "num_epochs"}  # in section train
    assert attributes - HAS_EFFECT - set(WITHOUT_EFFECT) == set(), "in no table"
    assert set(WITHOUT_EFFECT) <= attributes, "not of this RLlib"
    assert not HAS_EFFECT & set(WITHOUT_EFFECT)


@pytest.mark.parametrize("name", sorted(set(WITHOUT_EFFECT) - {"policies"}))
def test_a_setting_without_effect_is_refused_with_what_to_use(toy_config: Make, name: str) -> None:
    """Whatever other value it is given, as an attribute or in a dict."""
    config = toy_config()
    vars(config)[name] = ["something else"]
    found = [v for v in config_violations(config) if v.value == ["something else"]]
    assert [v.remedy for v in found] == [f"use {WITHOUT_EFFECT[name]}"]


@pytest.mark.parametrize(
    ("unit", "samples", "valid"),
    [
        ("prompts", 1, True),
        ("prompts", 3, True),
        ("episodes", 1, True),
        ("episodes", 3, False),
        ("timesteps", 1, False),
    ],
)
def test_the_unit_of_an_evaluation_is_obeyed_or_refused(
    toy_config: Make, unit: str, samples: int, valid: bool
) -> None:
    """An evaluation counts prompts; `episodes` is the same only with one answer each."""
    config = toy_config(eval_samples=samples, eval_temperature=1.0).evaluation(evaluation_duration_unit=unit)
    if valid:
        config.validate()
    else:
        assert f"evaluation_duration_unit = {unit!r}" in problems(config)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rollout_config": {"top_p": 1.0}}, "rollout"),
        ({"rollout_config/top_p": 1.0}, "rollout.top_p"),
        ({"precision_config": {}}, "precision"),
        ({"llm/path": "x"}, "model.path"),
        ({"grpo/clip_low": 0.1}, "train.clip_low"),
        ({"lr": 1e-3}, "train.lr"),
        ({"grad_clip": 1.0}, "train.grad_clip"),
        ({"num_epochs": 2}, "train.num_epochs"),
    ],
)
def test_other_names_are_refused_with_the_one_name(toy_config: Make, old: dict[str, Any], new: str) -> None:
    """A setting has one name; another is no silent alias."""
    config = toy_config().update_from_dict(old)
    assert f"is called {new} -> write {new}" in problems(config)
    assert config.lr == 1e-3


@pytest.mark.parametrize(
    ("change", "attribute", "value"),
    [
        ({"run/seed": 5}, "seed", 5),
        ({"run": {"seed": 5}}, "seed", 5),
        ({"run": {"resources": {"num_learners": 2}}}, "num_learners", 2),
        ({"run/resources/num_env_runners": 2}, "num_env_runners", 2),
        ({"evaluation/prompts": 7}, "evaluation_duration", 7),
        ({"env/name": "x:Y"}, "env", "x:Y"),
        ({"env": {"name": "x:Y"}}, "env", "x:Y"),
        ({"env": "x:Y"}, "env", "x:Y"),
        ({"env/config/hi": 3}, "env_config", {"lo": 1, "hi": 3}),
        ({"env": {"config": {"hi": 3}}}, "env_config", {"lo": 1, "hi": 3}),
        ({"lr": 1}, "lr", 1e-3),
    ],
)
def test_settings_that_rllib_keeps_have_the_name_of_a_file_too(
    toy_config: Make, change: dict[str, Any], attribute: str, value: Any
) -> None:
    """`run/seed` in a search space is the `run.seed` of a YAML file."""
    config = toy_config(env_config={"lo": 1}).update_from_dict(change)
    assert getattr(config, attribute) == value


def test_a_drawn_value_shows_in_the_nested_place() -> None:
    """What Tune draws for "rollout/temperature" is what a trial's config says under rollout, too."""
    trial = {
        **GRPOConfig().model("tiny-chain").to_dict(),
        "rollout/temperature": 0.83,
        "train/lr": 2e-4,
        "run/seed": 9,
        "rollout/engine_options/device": "cpu",
    }
    GRPO.default_resource_request(trial)
    assert (trial["rollout"]["temperature"], trial["train"]["lr"], trial["seed"]) == (0.83, 2e-4, 9)
    assert trial["rollout"]["engine_options"] == {"device": "cpu"}
    assert GRPOConfig().update_from_dict(trial).settings().rollout.temperature == 0.83


@pytest.mark.parametrize("name", GROUPS)
def test_fluent_methods_show_an_editor_every_setting(name: str) -> None:
    """Keyword, type, default and meaning of a fluent method are those of the section's dataclass."""
    method = getattr(GRPOConfig, {"train": "training"}.get(name, name))
    parameters = inspect.signature(method).parameters
    text = " ".join(inspect.getdoc(method).split())
    fields = {field.name: field for field in dataclasses.fields(GROUPS[name])}
    assert [p for p in parameters if p not in ("self", "rllib")] == list(fields)
    for key, field in fields.items():
        loose = {
            "policy": "str | dict | PrecisionPolicy",
            "correction": "CorrectionSettings | dict | None",
            "adapter": "AdapterSettings | dict | None",
        }
        assert str(parameters[key].annotation) == loose.get(key, field.type)
        assert f"{key}: {field.metadata['doc']} (default" in text
    bound = inspect.signature(getattr(GRPOConfig(), method.__name__)).parameters
    assert "self" not in bound
    assert set(fields) <= set(bound)


@pytest.mark.parametrize(
    ("group", "elsewhere", "here"),
    [
        ("training", "learning_rate", "train.lr"),
        ("training", "beta", "train.kl_coeff"),
        ("training", "max_grad_norm", "train.grad_clip"),
        ("training", "epsilon_high", "train.clip_high"),
        ("rollout", "num_generations", "rollout.group_size"),
        ("model", "lora_rank", "model.adapter"),
        ("rollout", "max_completion_length", "rollout.max_new_tokens"),
        ("model", "model_name_or_path", "model.path"),
        ("training", "model", "closest: model"),
    ],
)
def test_names_of_other_libraries_are_known(group: str, elsewhere: str, here: str) -> None:
    """Who comes from TRL, verl or Hugging Face is told the name, in Python as on the command line."""
    with pytest.raises(
        SettingsError, match=f"no such setting -> closest: .*{here.removeprefix('closest: ')}"
    ):
        getattr(GRPOConfig(), group)(**{elsewhere: 1})


def test_settings_convert_nothing_but_ints_to_floats_and_lists_to_tuples(toy_config: Make) -> None:
    """Values keep their type: what YAML and Tune write is accepted, what would change meaning is not."""
    train = toy_config().training(betas=[0, 0.5], eps=1, lr=[[0, 1e-3], [5, 1]]).settings().train
    assert train.betas == (0.0, 0.5)
    assert isinstance(train.eps, float)
    assert train.lr == ((0.0, 1e-3), (5.0, 1.0))
    config = toy_config(group_size=np.int64(4), temperature=np.float64(0.5))
    assert config.settings().rollout.group_size == 4
    wrong = toy_config().training(betas=[0.1], eps="1e-8", kl_estimator="k4")
    with pytest.raises(SettingsError) as error:
        wrong.settings()
    assert [v.key for v in error.value.violations] == ["train.kl_estimator", "train.betas", "train.eps"]

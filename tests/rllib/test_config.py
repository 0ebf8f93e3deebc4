"""GRPOConfig: fluent groups, refusals that name everything, and Tune dicts."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from rllib_llm import GRPO, DAPOConfig, DrGRPOConfig, GRPOConfig, GSPOConfig, ReinforcePPConfig, RLOOConfig
from rllib_llm.algorithm.settings import GRPOSettings, parse

Make = Callable[..., Any]


def problems(config: GRPOConfig) -> str:
    with pytest.raises(ValueError, match="problem") as error:
        config.validate()
    return str(error.value)


def test_model_is_a_fluent_group_and_still_rllibs_dict(toy_model: str) -> None:
    """`config.model(path)` works although AlgorithmConfig stores a dict under the instance attribute `model`."""
    config = GRPOConfig().model(toy_model, gradient_checkpointing=True)
    assert config.llm["path"] == toy_model
    assert config.llm["gradient_checkpointing"] is True
    assert config.model["custom_model"] is None, "RLlib's validation reads the legacy dict"
    assert vars(config)["model"]["custom_model"] is None


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
        ({"rollout_config": {"temperature": 0.5}}, "rollout.temperature"),
        ({"rollout_config/temperature": 0.5}, "rollout.temperature"),
        ({"rollout": {"temperature": 0.5}}, "rollout.temperature"),
        ({"grpo/clip_high": 0.5}, "grpo.clip_high"),
        ({"precision_config/policy": "bf16"}, "policy.name"),
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
    assert after.rollout.group_size == before.rollout_config["group_size"]
    assert after.model == before.settings().model


def test_model_by_dict(toy_model: str) -> None:
    """{"model": path} means our group, RLlib's own model dict passes through."""
    config = GRPOConfig().update_from_dict({"model": toy_model})
    assert config.llm["path"] == toy_model
    assert GRPOConfig().update_from_dict({"model": {"path": toy_model}}).llm["path"] == toy_model
    assert GRPOConfig().update_from_dict(GRPOConfig().to_dict()).llm["path"] is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: setattr(c, "rolout_config", {}), "no setting 'rolout_config' (closest: 'rollout_config')"),
        (lambda c: c.update_from_dict({"lerning_rate": 1}), "no setting 'lerning_rate'"),
        (lambda c: c.update_from_dict({"rollout/temprature": 1}), "temprature does not exist (closest: 'temperature')"),
        (lambda c: c.update_from_dict({"grpo/clip_hihg": 1}), "grpo.clip_hihg does not exist (closest: 'clip_high')"),
        (lambda c: c.rollout(group_size="8"), "rollout_config.group_size = '8' must be int"),
        (lambda c: c.rollout(group_size=True), "rollout_config.group_size = True must be int"),
        (
            lambda c: c.rollout(engine="vllm", engine_options={"device": "cpu"}, sleep_while_learning=True),
            "vLLM on a CPU cannot give memory back",
        ),
        (
            lambda c: c.rollout(engine_options={"device": "cpu"}, weight_transport="nccl"),
            "weight_transport = 'nccl' with",
        ),
        (lambda c: c.rollout(weight_transport="ipc"), "must be one of 'auto', 'cuda_ipc', 'nccl', 'gloo'"),
        (lambda c: c.rollout(group_size=1), "compare the answers to one prompt"),
        (lambda c: c.rollout(temperature=0.0), "must be > 0"),
        (lambda c: c.rollout(top_p=0.0), "top_p = 0.0 must be in (0, 1]"),
        (lambda c: c.rollout(min_new_tokens=9), "between 0 and max_new_tokens = 4"),
        (lambda c: c.rollout(min_new_tokens=2, max_turns=2), "cannot tell where an answer begins"),
        (lambda c: c.rollout(eval_samples=4), "repeat one greedy answer"),
        (lambda c: c.rollout(prompts_per_iteration=5).training(minibatches_per_epoch=3), "must divide"),
        (lambda c: c.training(loss="gpro"), "grpo.loss = 'gpro'"),
        (lambda c: c.training(clip_low=2.0), "clip_low = 2.0"),
        (lambda c: c.training(loss_config={"dual": 3}), "no such setting"),
        (lambda c: c.training(advantages="z"), "grpo.advantages = 'z' must be one of"),
        (lambda c: c.training(correction={"kind": "tis"}), "must have a kind out of"),
        (lambda c: c.training(lr_decay="linear"), "a decay needs the number of optimiser steps"),
        (lambda c: c.training(betas=(0.9, 1.0)), "must be in [0, 1)"),
        (lambda c: c.training(minibatch_size=4), "use training(minibatches_per_epoch=...)"),
        (lambda c: c.training(train_batch_size=64), "use rollout(prompts_per_iteration=..., group_size=...)"),
        (lambda c: c.training(grad_clip_by="value"), "grad_clip_by = 'value' has no effect"),
        (lambda c: c.training(overlong_buffer=99), "grpo.overlong_buffer = 99"),
        (lambda c: c.env_runners(num_env_runners=9), "some runners would never sample"),
        (lambda c: c.learners(num_learners=17), "cannot feed num_learners = 17"),
        (lambda c: c.learners(num_learners="2"), "num_learners = '2' must be a whole number"),
        (lambda c: c.env_runners(num_env_runners=1.5), "num_env_runners = 1.5 must be a whole number"),
        (lambda c: c.training(num_epochs=1.5), "num_epochs = 1.5 must be a whole number"),
        (lambda c: c.training(lr=[1, 2]), "must be a schedule of pairs"),
        (lambda c: c.rollout(engine_options={"device": "cdua"}), "device = 'cdua' must be cpu, cuda or cuda:N"),
        (lambda c: c.rollout(max_new_tokens=10**23), "must be below 2**31"),
        (lambda c: c.rollout(stop_token_ids=[-1, 10**9]), "stop_token_ids = [-1, 1000000000] must be from 0 to"),
        (lambda c: c.model(c.llm["path"], max_sequence_length=10**9), "max_position_embeddings"),
        (lambda c: c.rollout(engine="torhc"), "rollout_config.engine = 'torhc' must be one of torch, vllm"),
        (
            lambda c: c.rollout(engine_options={"max_num_seq": 3}),
            "engine_options has no 'max_num_seq' for engine 'torch' (closest: 'max_num_seqs')",
        ),
        (lambda c: c.precision("unified-fp9"), "precision_config.policy"),
        (lambda c: c.model("/no/such/model"), "llm.path = '/no/such/model'"),
        (lambda c: setattr(c, "evaluation_parallel_to_training", True), "sequential evaluation"),
        (lambda c: c.evaluation(evaluation_config={"explore": False}), "without evaluation runners of its own"),
        (lambda c: c.env_runners(explore=False), "explore = False"),
        (lambda c: c.training(gamma=1.0), "gamma = 1.0 has no effect"),
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
    config.update_from_dict({"grpo/clip_hihg": 1.0}).training(minibatches_per_epoch=0)
    text = problems(config)
    for part in (
        "group_size = '4' must be int",
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
    [("rollout", "temprature"), ("training", "clip_hihg"), ("training", "minibatches_per_epohc")],
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
    assert config.grpo["loss"] == loss
    assert GRPOConfig().update_from_dict(config.to_dict()).grpo == config.grpo
    changed = {k for k, v in GRPOConfig().grpo.items() if config.grpo[k] != v}
    assert changed <= {"loss", "dynamic_sampling"}


def test_resources_count_every_process(toy_config: Make) -> None:
    """Tune reserves the driver, each env runner, each evaluation runner and each learner: nothing waits for ever."""
    config = toy_config().env_runners(num_env_runners=2).learners(num_learners=2)
    config.evaluation(evaluation_num_env_runners=1, evaluation_interval=1)
    assert len(GRPO.default_resource_request(config.to_dict()).bundles) == 1 + 2 + 1 + 2
    config.evaluation(evaluation_num_env_runners=0)
    assert len(GRPO.default_resource_request(config.to_dict()).bundles) == 1 + 2 + 2, (
        "no own evaluation runners"
    )


def test_parse_converts_nothing_but_ints_to_floats_and_lists_to_tuples() -> None:
    """Values keep their type: what YAML and Tune write is accepted, what would change meaning is not."""
    parsed, found = parse(GRPOSettings, {"betas": [0, 0.5], "eps": 1}, "grpo")
    assert not found
    assert parsed.betas == (0.0, 0.5)
    assert isinstance(parsed.eps, float)
    _, found = parse(GRPOSettings, {"betas": [0.1], "eps": "1e-8", "kl_estimator": "k4"}, "grpo")
    assert len(found) == 3

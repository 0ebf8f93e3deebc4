from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files

import pytest

from rllib_llm.envs import EnvConfigError, make_env

PRODUCTS = {"task": "products", "task_config": {"min_digits": 1, "max_digits": 2}}
CURRICULUM = {"window": 4, "raise_at": 0.75, "lower_at": 0.25}


def answer_all(factory, indices, right):
    for index in indices:
        env = factory()
        env.reset(index)
        env.step(factory.problem(index).answer if right else "wrong")


def test_right_answer_earns_one_and_info_names_the_task():
    """The library's own answer gets 1, another text 0, and each problem says which task it is."""
    factory = make_env("reasoning_gym", PRODUCTS)
    env = factory()
    prompt = env.reset(0)
    assert (prompt.info["task"], prompt.info["split"]) == ("products", "train")
    problem = factory.problem(0)
    assert problem.question == prompt.text
    result = env.step(problem.answer)
    assert (result.reward, result.done, result.info["correct"]) == (1.0, True, True)


def test_partial_credit_counts_only_when_asked_for():
    """A text that contains the answer scores between 0 and 1 in the library: 0 here, unless partial_credit is set."""
    rewards = {}
    for partial in (False, True):
        factory = make_env("reasoning_gym", {**PRODUCTS, "partial_credit": partial})
        env = factory()
        env.reset(0)
        result = env.step(f"it is {factory.problem(0).answer}, I think")
        rewards[partial] = result.reward
        assert result.info["correct"] is False
    assert rewards[False] == 0.0
    assert 0.0 < rewards[True] < 1.0


def test_group_members_get_one_problem():
    """Envs of one factory that reset to the same index show the same prompt."""
    factory = make_env("reasoning_gym", PRODUCTS)
    assert len({factory().reset(17).text for _ in range(8)}) == 1


def test_mixture_follows_its_weights():
    """A task of weight 3 is asked three times as often, within four standard errors."""
    tasks = [{"task": "products", "weight": 3.0}, {"task": "gcd", "weight": 1.0}]
    factory = make_env("reasoning_gym", {"tasks": tasks})
    count = 800
    asked = Counter(factory.problem(i).info["task"] for i in range(count))
    assert abs(asked["products"] / count - 0.75) < 4 * (0.75 * 0.25 / count) ** 0.5
    assert set(asked) == {"products", "gcd"}


def test_curriculum_rises_with_success_and_falls_with_failure():
    """The level goes up after a window of right answers, down after a window of wrong ones, and never past its ends."""
    factory = make_env("reasoning_gym", {"task": "chain_sum", "curriculum": {**CURRICULUM, "top": 2}})
    assert factory().reset(0).info["level"] == 0
    answer_all(factory, range(4), right=True)
    assert factory().reset(0).info["level"] == 1
    answer_all(factory, range(12), right=True)
    assert factory().reset(0).info["level"] == 2
    answer_all(factory, range(40), right=False)
    assert factory().reset(0).info["level"] == 0


def test_a_higher_level_asks_harder_problems():
    """reasoning-gym's level 6 of chain_sum has more terms than its level 0, which has two."""
    factory = make_env("reasoning_gym", {"task": "chain_sum", "curriculum": {"start": 6}})
    easy = make_env("reasoning_gym", {"task": "chain_sum", "curriculum": {}})
    terms = [
        [f.problem(i).question.count(" + ") + f.problem(i).question.count(" - ") for i in range(50)]
        for f in (easy, factory)
    ]
    assert set(terms[0]) == {1}
    assert max(terms[1]) > 4


def test_answers_to_a_level_that_was_left_do_not_count():
    """Envs that were reset before a level change report late without moving the new level."""
    factory = make_env("reasoning_gym", {"task": "chain_sum", "curriculum": CURRICULUM})
    envs = [factory() for _ in range(12)]
    for index, env in enumerate(envs):
        env.reset(index)
    answers = [factory.problem(index).answer for index in range(12)]
    for env, answer in zip(envs, answers, strict=True):
        env.step(answer)
    assert factory.curriculum.level("chain_sum") == 1


def test_evaluation_does_not_move_with_the_curriculum():
    """The eval split stays at the start level, so its numbers can be compared over time."""
    factory = make_env("reasoning_gym", {"task": "chain_sum", "curriculum": CURRICULUM}, split="eval")
    answer_all(factory, range(40), right=True)
    assert {factory().reset(i).info["level"] for i in range(5)} == {0}


def test_curriculum_state_survives_json():
    """A restored factory asks the same problems and counts on from where the saved one was."""
    config = {"tasks": [{"task": "chain_sum"}, {"task": "gcd"}], "curriculum": CURRICULUM}
    saved = make_env("reasoning_gym", config)
    answer_all(saved, range(30), right=True)
    restored = make_env("reasoning_gym", config)
    restored.problem(40)  # cached at the old level: must not survive set_state
    restored.set_state(json.loads(json.dumps(saved.get_state())))
    assert restored.get_state() == saved.get_state()
    assert saved.curriculum.level("gcd") > 0
    assert [restored.problem(i).id for i in range(40, 60)] == [saved.problem(i).id for i in range(40, 60)]


def test_state_of_another_run_is_refused():
    """Levels of other tasks, impossible levels and state for a run without curriculum are errors."""
    with_curriculum = make_env("reasoning_gym", {"task": "gcd", "curriculum": {}})
    plain = make_env("reasoning_gym", {"task": "gcd"})
    with pytest.raises(ValueError, match="has no state"):
        plain.set_state(with_curriculum.get_state())
    with pytest.raises(ValueError, match="tasks"):
        with_curriculum.set_state({"curriculum": {"lcm": [0, 0, 0]}})
    with pytest.raises(ValueError, match="level 99"):
        with_curriculum.set_state({"curriculum": {"gcd": [99, 0, 0]}})
    plain.set_state({})


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({}, ["task or tasks must be given"]),
        ({"task": "gcd", "tasks": []}, ["exactly one of them"]),
        ({"tasks": []}, ["tasks is empty"]),
        ({"task": "gdc"}, ["did you mean 'gcd'"]),
        (
            {"task": "gcd", "task_config": {"max_vlaue": 3, "seed": 1}},
            ["did you mean 'max_value'", "seed is not an option"],
        ),
        ({"task": "gcd", "task_config": {"min_value": 9, "max_value": 1}}, ["AssertionError"]),
        (
            {"tasks": [{"task": "gcd", "weight": 0}, {"task": "gcd"}, {"tsk": 1}]},
            ["tasks[0].weight", "tasks[2].task is missing"],
        ),
        ({"tasks": [{"task": "gcd"}, {"task": "gcd"}]}, ["is there twice"]),
        ({"tasks": [{"task": "gcd"}], "task_config": {"max_value": 3}}, ["belongs to task"]),
        (
            {"task": "gcd", "curriculum": {"raise_at": 0.5, "lower_at": 0.6, "window": 0}},
            ["lower_at", "window"],
        ),
        ({"task": "mahjong_puzzle", "curriculum": {"start": 3, "top": 1}}, ["below start"]),
        (
            {"task": "gcd", "eval_fraction": 1, "split_seed": "a", "partial_credit": 1},
            ["eval_fraction", "split_seed", "partial"],
        ),
    ],
)
def test_wrong_configuration_is_refused_with_every_mistake(config, parts):
    """Each message names the key, the value and what is possible; several mistakes come together."""
    with pytest.raises(EnvConfigError) as error:
        make_env("reasoning_gym", config)
    for part in parts:
        assert part in str(error.value)


def test_config_of_the_shipped_model_gives_short_labelled_prompts():
    """env_config.json beside tiny-chain turns the library's wording into labelled sums of 5 to 7 terms."""
    config = json.loads((files("rllib_llm.assets") / "tiny-chain" / "env_config.json").read_text())
    factory = make_env("reasoning_gym", config)
    for index in range(50):
        text = factory().reset(index).text
        assert text.endswith("=")
        assert " " not in text
        labels = [c for c in text if c.isalpha()]
        assert labels == list("abcdef")[: len(labels)]
        assert 4 <= len(labels) <= 6
        digits = [c for c in text if c.isdigit()]
        total = int(digits[0]) + sum(
            int(f"{op}{d}") for op, d in zip([c for c in text if c in "+-"], digits[1:], strict=True)
        )
        env = factory()
        env.reset(index)
        assert env.step(f"working#{total}").reward == 1.0

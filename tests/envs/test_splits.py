from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rllib_llm.envs import EnvConfigError, make_env
from rllib_llm.envs.splits import normalise, split_of, unit_hash

SMALL = {"task": "products", "task_config": {"min_digits": 1, "max_digits": 1}}  # 100 distinct problems
SUMS = {"task": "chain_sum", "task_config": {"min_terms": 2, "max_terms": 4, "max_digits": 1}}
MIXTURE = {"tasks": [{**SMALL, "weight": 2}, {**SUMS, "weight": 1}, {"task": "gsm_symbolic"}]}


def questions(config, split, seed, count=300):
    factory = make_env("reasoning_gym", config, split=split, seed=seed)
    return {normalise(factory.problem(i).question) for i in range(count)}


@pytest.mark.parametrize("config", [SMALL, SUMS, MIXTURE])
@pytest.mark.parametrize("seeds", [(0, 0), (0, 1), (1, 0), (7, 8)])
def test_train_and_eval_never_share_a_problem(config, seeds):
    """Whatever the two seeds, also the neighbouring ones with which reasoning-gym repeats its items shifted by one."""
    train, evaluation = questions(config, "train", seeds[0]), questions(config, "eval", seeds[1])
    assert train
    assert evaluation
    assert train.isdisjoint(evaluation)


def test_curriculum_keeps_the_splits_apart():
    """Problems of a raised level still belong to one split only."""
    train = make_env("reasoning_gym", {**SUMS, "curriculum": {"window": 1, "raise_at": 1.0}}, "train", 0)
    seen = set()
    for index in range(300):
        env = train()
        env.reset(index)
        problem = train.problem(index)
        seen.add(normalise(problem.question))
        env.step(problem.answer)
    assert train.curriculum.level("chain_sum") > 5
    hard = {"task": "chain_sum", "task_config": {"min_terms": 2, "max_terms": 8, "max_digits": 3}}
    assert seen.isdisjoint(questions(hard, "eval", 0, 500) | questions(SUMS, "eval", 0))


def test_same_seed_gives_the_same_problems_and_another_seed_others():
    """The order of problems is a function of the seed and the index alone."""
    a, b = (make_env("reasoning_gym", SUMS, "train", 3) for _ in range(2))
    assert [a.problem(i).question for i in (5, 0, 2)] == [b.problem(i).question for i in (5, 0, 2)]
    other = make_env("reasoning_gym", SUMS, "train", 4)
    assert [a.problem(i).id for i in range(20)] != [other.problem(i).id for i in range(20)]


@given(st.text(max_size=40), st.integers(0, 5), st.floats(0.01, 0.99))
def test_every_problem_is_in_exactly_one_split_whatever_its_whitespace(text, seed, fraction):
    """Splitting depends on the words of the question only."""
    split = split_of(text, seed, fraction)
    assert split in ("train", "eval")
    assert split_of("  " + text.replace(" ", " \n "), seed, fraction) == split


def test_share_of_eval_problems_is_the_fraction():
    """Over 20 000 texts the share is within four standard errors of eval_fraction."""
    count, fraction = 20_000, 0.2
    share = sum(split_of(f"question {i}", 0, fraction) == "eval" for i in range(count)) / count
    assert abs(share - fraction) < 4 * (fraction * (1 - fraction) / count) ** 0.5


def test_hash_is_the_same_everywhere():
    """A split must not move with the Python version or PYTHONHASHSEED: the values are pinned."""
    assert unit_hash("split", 0, "1 + 1") == 0.9301814815065094


def test_too_small_a_task_is_refused():
    """A task whose problems are all in one split is an error that says what to change, not an endless search."""
    factory = make_env("reasoning_gym", {**SMALL, "eval_fraction": 1e-6}, "eval")
    with pytest.raises(EnvConfigError, match="too few distinct problems"):
        factory.problem(0)


def test_jsonl_splits_are_disjoint_and_complete(tmp_path):
    """Every row is in exactly one split, for any seed."""
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) for i in range(100)))
    rows = {}
    for split, seed in (("train", 0), ("eval", 1)):
        factory = make_env("jsonl_math", {"path": str(path)}, split, seed)
        rows[split] = {factory.problem(i).question for i in range(factory.num_problems)}
        assert len(rows[split]) == factory.num_problems
    assert rows["train"].isdisjoint(rows["eval"])
    assert len(rows["train"] | rows["eval"]) == 100

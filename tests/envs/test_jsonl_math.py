from __future__ import annotations

import json
from pathlib import Path

import pytest

from rllib_llm.envs import EnvConfigError, make_env

FILE = str(Path(__file__).parent / "data" / "arithmetic.jsonl")
CONFIG = {"path": FILE, "answer_after": "####", "eval_fraction": 0.3}


def write(path, *lines):
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8"
    )
    return str(path)


def test_gsm8k_style_file_is_played():
    """The answer after the marker is the gold answer; a completion's last number is compared with it."""
    factory = make_env("jsonl_math", CONFIG)
    assert factory.num_problems + make_env("jsonl_math", CONFIG, "eval").num_problems == 12
    for index in range(factory.num_problems):
        env = factory()
        prompt = env.reset(index)
        problem = factory.problem(index)
        assert prompt.info["id"].startswith("arithmetic.jsonl:")
        assert env.step(f"So the answer is {problem.answer}").reward == 1.0
        assert env.step("So the answer is 987654").reward == 0.0


def test_training_shuffles_each_pass_and_evaluation_goes_in_order():
    """Every pass over the training split holds each problem once, in another order; evaluation is the file's order."""
    factory = make_env("jsonl_math", CONFIG, seed=5)
    n = factory.num_problems
    passes = [[factory.problem(p * n + i).id for i in range(n)] for p in range(3)]
    assert all(len(set(ids)) == n for ids in passes)
    assert len({tuple(ids) for ids in passes}) == 3
    evaluation = make_env("jsonl_math", CONFIG, "eval", seed=5)
    lines = [int(evaluation.problem(i).id.split(":")[1]) for i in range(evaluation.num_problems)]
    assert lines == sorted(lines)
    assert evaluation.problem(evaluation.num_problems).id == evaluation.problem(0).id


def test_few_shot_examples_show_the_whole_solution():
    """Shots carry the file's answer text and are not asked."""
    factory = make_env("jsonl_math", {**CONFIG, "prompt": {"few_shot": 2}})
    text = factory().reset(0).text
    assert text.count("####") == 2
    plain = make_env("jsonl_math", CONFIG)
    assert factory.num_problems == plain.num_problems - 2


def test_every_malformed_line_is_reported_at_once(tmp_path):
    """One error lists each bad line with its number; good and blank lines are not mentioned."""
    path = write(
        tmp_path / "bad.jsonl",
        {"question": "fine?", "answer": 1},
        "{not json",
        "[1]",
        {"answer": 1},
        "",
        {"question": "a", "prompt": "b", "answer": 1},
        {"question": " ", "answer": 1},
        {"question": "c"},
        {"question": "d", "answer": True},
        {"question": "e", "answer": ""},
        {"question": "fine?  ", "answer": 2},
    )
    with pytest.raises(EnvConfigError) as error:
        make_env("jsonl_math", {"path": path})
    text = str(error.value)
    assert "9 malformed" in text
    assert [f"line {n}:" in text for n in range(1, 12)] == [False, True, True, True, False, *[True] * 6]
    assert "same question as line 1" in text


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({}, "path is missing"),
        ({"path": "/no/such/file.jsonl"}, "cannot read /no/such/file.jsonl"),
        ({"path": FILE, "answer_after": "@@"}, "nothing after '@@'"),
        ({"path": FILE, "eval_path": FILE}, "shares 12 problems"),
        ({"path": FILE, "eval_fraction": 1e-9}, "0 for evaluation"),
        ({"path": FILE, "timeout_s": 0}, "timeout_s"),
        ({"path": FILE, "pth": 1}, "did you mean 'path'"),
    ],
)
def test_wrong_configuration_is_refused(config, part):
    """Each message names what is wrong."""
    with pytest.raises(EnvConfigError) as error:
        make_env("jsonl_math", config)
    assert part in str(error.value)


def test_separate_evaluation_file(tmp_path):
    """With eval_path the whole of `path` is for training and the other file for evaluation."""
    evaluation = write(tmp_path / "eval.jsonl", {"question": "1+1?", "answer": "2"})
    config = {"path": FILE, "eval_path": evaluation, "answer_after": None}
    assert make_env("jsonl_math", config, "train").num_problems == 12
    assert make_env("jsonl_math", config, "eval").problem(0).answer == "2"

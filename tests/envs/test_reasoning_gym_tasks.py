from __future__ import annotations

import os

import pytest

from rllib_llm.envs import EnvConfigError, make_env
from rllib_llm.envs.reasoning_gym_tasks import (
    ALLOWED,
    REFUSED,
    create_dataset,
    create_levels,
    last_valid_level,
    refusal,
)

# Would leave a mark if a scorer evaluated it, as a value, in a list, or through sympy's parser.
MARK = "RLLIB_LLM_SCORER_EXECUTED"
_SET = f"__import__('os').environ.__setitem__('{MARK}', '1')"
HOSTILE = [
    *(_SET, f"[{_SET}]", f"({_SET}, 1)[1]"),
    *("9**9**9", "1e999999999", "-1e400", "9" * 400, "9" * 400 + " days", "1 days, " + "9" * 400 + ":00"),
    *("nan", "nani", "(nan, nan)", "inf", "1/0", "0/0", "", " ", "#", "\x00", "²", "½", "🙂", "×"),
    *(
        "[",
        "{",
        "[]",
        "{}",
        "[[]]",
        '{"a": 1}',
        "null",
        '["w,a,b"]',
        "a=1",
        "1,2",
        "1:2",
        "(" * 2000,
        "[" * 2000,
    ),
]
# Making one of these costs 50 ms and more.
SLOW = {
    "futoshiki",
    "group_anagrams",
    "rearc",
    "sokoban",
    "sudoku",
    "zebra_puzzles",
    "polynomial_equations",
    "word_ladder",
}


def test_every_task_of_the_library_is_judged():
    """Allowed and refused together are the library's tasks, and none is both."""
    from reasoning_gym.factory import DATASETS

    assert ALLOWED.isdisjoint(REFUSED)
    assert set(DATASETS) == ALLOWED | set(REFUSED)


@pytest.mark.filterwarnings("ignore:loadtxt")
@pytest.mark.parametrize("task", sorted(ALLOWED))
def test_allowed_scorers_take_anything_a_model_can_write(task):
    """They accept their own answer, neither execute nor raise on hostile text, and give it no full score."""
    dataset = create_dataset(task, {}, None)
    for number in range(1, 2 if task in SLOW else 4):
        entry = dataset[number]
        assert isinstance(entry["question"], str)
        assert isinstance(entry["answer"], str)
        assert dataset.score_answer(entry["answer"], entry) == 1.0
        for text in HOSTILE:
            score = dataset.score_answer(text, entry)
            assert (
                score < 1.0 or text.lower() == entry["answer"].lower() or _same_number(text, entry["answer"])
            ), text
    assert MARK not in os.environ


def _same_number(text, answer):
    try:
        return float(text) == float(answer)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "task", ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown", "puzzle24"]
)
def test_refused_scorers_do_execute_what_the_model_wrote(task):
    """The reason is real: the same text that leaves allowed scorers cold runs here."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=1)
    try:
        for text in HOSTILE[:2]:
            dataset.score_answer(text, dataset[0])
        assert os.environ.pop(MARK) == "1"
    finally:
        os.environ.pop(MARK, None)


@pytest.mark.parametrize(
    ("task", "text"),
    [("complex_arithmetic", "nan"), ("game_of_life_halting", "anything"), ("figlet_font", None)],
)
def test_scorers_that_accept_wrong_answers_are_refused(task, text):
    """A policy would find these: 1.0 for an answer that is wrong."""
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(task, seed=0, size=50)
    if text is None:  # ten right letters and ten wrong ones after them
        dataset = reasoning_gym.create_dataset(task, seed=0, size=50, min_word_len=10, max_word_len=12)
        text = dataset[0]["answer"] + "x" * 10
    assert dataset.score_answer(text, dataset[0]) == 1.0
    assert task in REFUSED


@pytest.mark.parametrize("task", sorted(REFUSED))
def test_refused_task_says_why(task):
    """The error repeats the reason from the table."""
    with pytest.raises(EnvConfigError) as error:
        make_env("reasoning_gym", {"task": task})
    assert REFUSED[task] in str(error.value)
    assert refusal(task) is not None


def test_other_library_versions_are_refused(monkeypatch):
    """Scorers were read in one version; another one may execute text again."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.2.0")
    with pytest.raises(EnvConfigError, match=r"0\.2\.0 is installed; scorers were audited for 0\.1\.25"):
        create_dataset("gcd", {}, None)


def test_every_level_up_to_the_last_valid_one_makes_problems():
    """Each allowed task with a curriculum can be created at its highest level that counts as valid."""
    with_levels = [task for task in sorted(ALLOWED - SLOW) if create_levels(task) is not None]
    assert len(with_levels) > 50
    for task in with_levels:
        create_dataset(task, {}, last_valid_level(task, {}))


def test_levels_that_the_task_itself_refuses_are_cut_off():
    """caesar_cipher's third level asks for rotations that its own validation forbids."""
    assert last_valid_level("caesar_cipher", {}) == 1
    with pytest.raises(EnvConfigError, match="highest level of 'caesar_cipher' is 1"):
        make_env("reasoning_gym", {"task": "caesar_cipher", "curriculum": {"top": 2}})

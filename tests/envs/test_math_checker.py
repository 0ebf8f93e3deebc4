from __future__ import annotations

import threading

import pytest

from rllib_llm.envs.math_checker import MathChecker, MathCheckError


@pytest.fixture(scope="module")
def checker():
    checker = MathChecker(seconds=600.0)
    yield checker
    checker.close()


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/4", "0.25", True),
        ("1,500", "1500", True),
        ("1500", "1,500", True),
        ("-3", "-3", True),
        ("-3", "3", False),
        (r"\frac{1}{2}", "0.5", True),
        (r"\boxed{12}", "12", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        (r"x^2+2x+1", r"(x+1)^2", True),
        ("7", "8", False),
        ("7", "", False),
        ("7", "seven", False),
        ("7", "__import__('os').getpid()", False),
        ("north", "north", True),
        ("north", "south", False),
    ],
)
def test_answers_are_compared_as_mathematics(checker, gold, answer, equal):
    """Numbers, LaTeX and expressions by value; what is no mathematics by text."""
    assert checker.equal(gold, answer) is equal


def test_works_outside_the_main_thread(checker):
    """math-verify's own timeouts need signals and fail here; the helper process does not care."""
    results = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(checker.equal("4", str(i)))) for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 5 + [True]


def test_endless_comparison_is_a_wrong_answer_and_the_next_one_works():
    """A tower of powers is cut off after the timeout and counted; the helper is replaced."""
    checker = MathChecker(seconds=600.0)
    try:
        assert checker.equal("1", "1")
        checker.seconds = 1.0
        assert checker.equal("7", r"9^{9^{9^{9}}}+\sqrt{2}") is False
        assert checker.timeouts == 1
        checker.seconds = 600.0
        assert checker.equal("2", "4/2")
    finally:
        checker.close()


def test_helper_that_cannot_start_is_an_error(monkeypatch):
    """A broken helper must not look like wrong answers."""
    monkeypatch.setattr("rllib_llm.envs.math_checker.sys.executable", "/bin/false")
    with pytest.raises(MathCheckError, match="did not start"):
        MathChecker(1.0).equal(r"\sqrt{4}", "1+1")

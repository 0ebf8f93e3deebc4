from __future__ import annotations

import pytest

from rllib_llm.envs import EnvConfigError, Prompt, make_env
from rllib_llm.envs.prompts import PromptTemplate, Shot

SHOTS = [{"question": "1+1?", "answer": "2"}]


def test_text_prompt_has_system_shots_and_question():
    """Text prompts join system text, worked examples and the question with the separator."""
    template = PromptTemplate.from_config(
        {
            "system": "Sums.",
            "template": "Q: {question}\nA:",
            "few_shot": SHOTS,
            "separator": "\n--\n",
            "answer_prefix": " ",
        }
    )
    assert template.render("2+{x}?", {}).text == "Sums.\n--\nQ: 1+1?\nA: 2\n--\nQ: 2+{x}?\nA:"


def test_chat_prompt_has_roles():
    """Chat prompts put the same parts into system, user and assistant messages."""
    prompt = PromptTemplate.from_config({"system": "Sums.", "few_shot": SHOTS, "chat": True}).render(
        "2+2?", {"id": "a"}
    )
    assert prompt.text is None
    assert prompt.info == {"id": "a"}
    assert [(m["role"], m["content"]) for m in prompt.messages] == [
        ("system", "Sums."),
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "2+2?"),
    ]


def test_rewrites_apply_in_order():
    """Each rewrite sees the result of the one before."""
    template = PromptTemplate.from_config({"rewrite": [["^.*: ", ""], [r"(\d) ", r"\1"], ["a", "b"]]})
    assert template.question("State: 1 + 2 a") == "1+ 2b"


def test_prompt_is_text_or_messages():
    """A prompt with both or neither has no meaning and is refused."""
    for kwargs in ({}, {"text": "a", "messages": []}):
        with pytest.raises(ValueError, match="exactly one"):
            Prompt(**kwargs)


def test_wrong_options_are_reported_together():
    """One error names template, rewrite and shot mistakes."""
    with pytest.raises(EnvConfigError) as error:
        PromptTemplate.from_config(
            {
                "template": "no placeholder",
                "rewrite": [["(", ""], ["a", r"\1"], "x"],
                "few_shot": [{"q": 1}],
                "chat": 1,
            }
        )
    for part in (
        "{question} exactly once",
        "rewrite[0]",
        "rewrite[1]",
        "rewrite[2]",
        "few_shot[0]",
        "chat = 1",
    ):
        assert part in str(error.value)


def test_drawn_shots_are_training_problems_and_never_asked():
    """few_shot: 3 shows the same three training problems in both splits and asks none of them."""
    config = {
        "task": "products",
        "task_config": {"max_digits": 1, "min_digits": 1},
        "prompt": {"few_shot": 3},
    }
    factories = {split: make_env("reasoning_gym", config, split, seed=1) for split in ("train", "eval")}
    shots = factories["train"].shots
    assert len({shot.question for shot in shots}) == 3
    assert shots == factories["eval"].shots
    assert all(
        isinstance(shot, Shot) and factories["train"].in_split(shot.question, "train") for shot in shots
    )
    text = factories["eval"]().reset(0).text
    assert all(shot.question + shot.answer in text for shot in shots)
    asked = {factories["train"].problem(i).question for i in range(200)}
    assert asked.isdisjoint(shot.question for shot in shots)

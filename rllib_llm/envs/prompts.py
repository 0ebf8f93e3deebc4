"""From a problem's question to what the model reads: rewriting, template, few-shot examples, chat messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.protocol import Message, Prompt


@dataclass(frozen=True)
class Shot:
    """A worked example shown before the problem; `answer` is the text a good completion would be."""

    question: str
    answer: str


@dataclass(frozen=True)
class PromptTemplate:
    """Renders a question.

    rewrite: regular expressions (pattern, replacement) applied in order to the question, e.g. to shorten its wording.
    template: text with "{question}" in it. Other braces stay as they are.
    system: system prompt: a system message with chat=True, else text before everything.
    chat: give messages for the tokenizer's chat template instead of text; shots become user/assistant turns.
    few_shot: examples, or how many to draw from the training split (the adapter draws them).
    answer_prefix: before each shot's answer, e.g. a space: tokenizers see " 7" and "7" as different words.
    separator: between system text, shots and the problem (text prompts only).
    """

    rewrite: tuple[tuple[str, str], ...] = ()
    template: str = "{question}"
    system: str = ""
    chat: bool = False
    few_shot: int | tuple[Shot, ...] = 0
    answer_prefix: str = ""
    separator: str = "\n\n"

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any] | None, where: str = "env.config.prompt"
    ) -> PromptTemplate:
        """Raises `EnvConfigError` listing every wrong key."""
        section = Section(config, where)
        result = cls(
            rewrite=_rewrites(section),
            template=section.take(
                "template",
                "{question}",
                str,
                lambda t: t.count("{question}") == 1,
                "text containing {question} exactly once",
            ),
            system=section.take("system", "", str),
            chat=section.take("chat", False, bool),
            few_shot=_shots(section),
            answer_prefix=section.take("answer_prefix", "", str),
            separator=section.take("separator", "\n\n", str),
        )
        section.finish()
        return result

    def question(self, raw: str) -> str:
        """The question after `rewrite` and `template`."""
        for pattern, replacement in self.rewrite:
            raw = re.sub(pattern, replacement, raw)
        return self.template.replace("{question}", raw)

    def render(self, raw_question: str, info: dict[str, Any], shots: Sequence[Shot] = ()) -> Prompt:
        """Prompt for one problem. `shots` replaces a numeric `few_shot` with the examples that were drawn."""
        examples = tuple(shots) if isinstance(self.few_shot, int) else self.few_shot
        if self.chat:
            return Prompt(messages=self._messages(raw_question, examples), info=info)
        parts = [self.system] if self.system else []
        parts += [self.question(shot.question) + self.answer_prefix + shot.answer for shot in examples]
        return Prompt(text=self.separator.join([*parts, self.question(raw_question)]), info=info)

    def _messages(self, raw_question: str, examples: Sequence[Shot]) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for shot in examples:
            messages.append({"role": "user", "content": self.question(shot.question)})
            messages.append({"role": "assistant", "content": self.answer_prefix + shot.answer})
        return [*messages, {"role": "user", "content": self.question(raw_question)}]


def _rewrites(section: Section) -> tuple[tuple[str, str], ...]:
    pairs = section.take("rewrite", [], (list, tuple))
    result = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(isinstance(p, str) for p in pair):
            section.problem(f"rewrite[{number}]", f"= {pair!r}: expected [pattern, replacement]")
            continue
        try:
            re.sub(pair[0], pair[1], "")
            re.compile(pair[0])
        except (re.error, IndexError) as error:
            section.problem(
                f"rewrite[{number}]", f"= {pair!r}: not a regular expression and replacement ({error})"
            )
            continue
        result.append((pair[0], pair[1]))
    return tuple(result)


def _shots(section: Section) -> int | tuple[Shot, ...]:
    value = section.take(
        "few_shot",
        0,
        (int, list, tuple),
        lambda v: not isinstance(v, int) or v >= 0,
        "a count >= 0 or a list of {question, answer}",
    )
    if isinstance(value, int):
        return value
    shots = []
    for number, item in enumerate(value):
        if not isinstance(item, Mapping) or set(item) != {"question", "answer"}:
            section.problem(f"few_shot[{number}]", f"= {item!r}: expected {{question, answer}}")
            continue
        shots.append(Shot(str(item["question"]), str(item["answer"])))
    return tuple(shots)

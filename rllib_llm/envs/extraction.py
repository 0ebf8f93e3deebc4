"""Finding the answer in what the model wrote. No answer found is `None`: a wrong answer, never an error."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.numerals import Numeral, find_numerals
from rllib_llm.envs.protocol import EnvConfigError

KINDS = ("marker", "last_number", "tag", "boxed", "whole")


@dataclass(frozen=True)
class AnswerExtractor:
    """How to read an answer.

    kind "marker": the text after the last `marker` (GSM8K writes "####", the tiny model "#").
    kind "last_number": the last number in the text, whole and in one notation ("1234.50", "-3", "3/4", "1.5e3", "28%");
        None if what stands last looks like a number and is none or a part of one ("12:00", "1,2", "2\\pi").
    kind "tag": the content of the last complete <tag>…</tag>.
    kind "boxed": the content of the last complete LaTeX \\boxed{…}, braces inside it balanced.
    kind "whole": everything.
    until: the answer ends where this string first follows it (few-shot models go on writing); "" = at the end.
    A marker or an until inside a number (the dot of 3.14) is a part of the number and is not looked at.
    All results are stripped of surrounding whitespace; an empty one is None.
    """

    kind: str = "whole"
    marker: str = "#"
    tag: str = "answer"
    until: str = ""

    @classmethod
    def from_config(
        cls, config: str | Mapping[str, Any] | None, where: str = "env.config.answer"
    ) -> AnswerExtractor:
        """From a kind's name or a mapping {kind, marker|tag, until}; raises `EnvConfigError` with all wrong keys."""
        if isinstance(config, str):
            config = {"kind": config}
        section = Section(config, where)
        result = cls(
            kind=section.choice("kind", "whole", KINDS),
            marker=section.take("marker", "#", str, bool, "a non-empty string"),
            tag=section.take(
                "tag", "answer", str, lambda t: re.fullmatch(r"\w+", t) is not None, "a tag name"
            ),
            until=section.take("until", "", str),
        )
        section.finish()
        unused = {"marker": "marker", "tag": "tag"}
        for key, kind in unused.items():
            if config and key in config and result.kind != kind:
                raise EnvConfigError(
                    f"{where}.{key} has no effect with kind={result.kind!r}; set kind: {kind} or remove it"
                )
        return result

    def __call__(self, completion: str) -> str | None:
        """The answer in `completion`, stripped, or None."""
        found = getattr(self, f"_{self.kind}")(completion)
        if found is None:
            return None
        if self.until and self.kind != "last_number":
            found = self._before_until(found.lstrip())
        return found.strip() or None

    def written(self, answer: str) -> str:
        """A completion that gives `answer` in the form asked for."""
        if self.kind == "marker":
            return f"{self.marker} {answer}"
        if self.kind == "tag":
            return f"<{self.tag}>{answer}</{self.tag}>"
        return f"\\boxed{{{answer}}}" if self.kind == "boxed" else answer

    def _before_until(self, text: str) -> str:
        return next((text[:at] for at in _outside_numbers(text, self.until)), text)

    def _marker(self, text: str) -> str | None:
        found = list(_outside_numbers(text, self.marker))
        return text[found[-1] + len(self.marker) :] if found else None

    def _last_number(self, text: str) -> str | None:
        if self.until:
            text = self._before_until(text.lstrip())
        numerals = list(find_numerals(text))
        return numerals[-1].written if numerals and numerals[-1].value is not None else None

    def _tag(self, text: str) -> str | None:
        found = re.findall(rf"<{self.tag}>((?:(?!<{self.tag}>).)*?)</{self.tag}>", text, re.DOTALL)
        return found[-1] if found else None

    def _boxed(self, text: str) -> str | None:
        found = None
        for match in re.finditer(r"\\boxed\s*\{", text):
            depth, start = 1, match.end()
            for position in range(start, len(text)):
                depth += {"{": 1, "}": -1}.get(text[position], 0)
                if depth == 0:
                    found = text[start:position]
                    break
        return found

    def _whole(self, text: str) -> str | None:
        return text


def _outside_numbers(text: str, sought: str) -> Iterator[int]:
    """Where `sought` stands in `text` without cutting a number."""
    at = text.find(sought)
    spans = [(n.start + _currency(text, n), n.end) for n in find_numerals(text)] if at >= 0 else []
    while at >= 0:
        end = at + len(sought)
        cuts = any(start < end and at < stop and not (at <= start and stop <= end) for start, stop in spans)
        if not cuts:
            yield at
        at = text.find(sought, end)


def _currency(text: str, numeral: Numeral) -> int:
    """Length of a currency sign before the digits, which a marker may be."""
    written = text[numeral.start : numeral.end]
    return len(written) - len(written.lstrip("\\$€£¥₹₩₽ "))

"""Finding the answer in what the model wrote. No answer found is `None`: a wrong answer, never an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.protocol import EnvConfigError

KINDS = ("marker", "last_number", "tag", "boxed", "whole")

# Decimal or fraction; thousands commas allowed; a minus counts as a sign unless something is being subtracted ("7-3").
_NUMBER = re.compile(r"(?:(?<![\w.)])[-+])?\d+(?:,\d{3})*(?:\.\d+)?(?:/\d+)?")


@dataclass(frozen=True)
class AnswerExtractor:
    """How to read an answer.

    kind "marker": the text after the last `marker` (GSM8K writes "####", the tiny model "#").
    kind "last_number": the last number in the text, thousands commas removed.
    kind "tag": the content of the last complete <tag>…</tag>.
    kind "boxed": the content of the last complete LaTeX \\boxed{…}, braces inside it balanced.
    kind "whole": everything.
    until: the answer ends where this string first follows it (few-shot models go on writing); "" = at the end.
    All results are stripped of surrounding whitespace; an empty one is None.
    """

    kind: str = "whole"
    marker: str = "#"
    tag: str = "answer"
    until: str = ""

    @classmethod
    def from_config(
        cls, config: str | Mapping[str, Any] | None, where: str = "env_config.answer"
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
            found = found.lstrip().split(self.until, 1)[0]
        return found.strip() or None

    def _marker(self, text: str) -> str | None:
        _, marker, after = text.rpartition(self.marker)
        return after if marker else None

    def _last_number(self, text: str) -> str | None:
        if self.until:
            text = text.lstrip().split(self.until, 1)[0]
        numbers = _NUMBER.findall(text)
        return numbers[-1].replace(",", "").lstrip("+") if numbers else None

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

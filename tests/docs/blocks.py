"""Code blocks of the README, CONTRIBUTING and docs/, and the `rllib-llm` commands in them."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block. page: relative to the repository; line: of its first line of code, from 1."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Blocks in these languages, page by page."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text[: match.start(2)].count("\n") + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match[1], match[2]))
    return [block for block in found if block.language in languages]


def commands() -> list[tuple[str, list[str]]]:
    """(where, arguments) of each `rllib-llm` command: in shell blocks, and in text between single backticks that has
    no "…" and no placeholder in capitals alone (`rllib-llm COMMAND --help`)."""
    found = []
    for block in blocks("bash", "sh"):
        joined = re.sub(r"\\\n\s*", " ", re.sub(r"<<'(\w+)'\n.*?^\1$", "", block.text, flags=re.M | re.S))
        for line in joined.splitlines():
            words = shlex.split(line.replace("<directory>", "DIRECTORY"), comments=True)
            places = [place for place, word in enumerate(words) if word.rpartition("/")[2] == "rllib-llm"]
            found += [(str(block), words[place + 1 :]) for place in places]
    for page in PAGES:
        plain = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for text in re.findall(r"`rllib-llm ([^`]+)`", plain):
            if "…" not in text and "COMMAND" not in text:
                cut = re.sub(
                    r"\\\||\[.*?\]", " ", text.replace("NAME\\|FILE", "NAME").replace("FILE\\|CONFIG", "FILE")
                )
                found.append((str(page.relative_to(ROOT)), shlex.split(cut)))
    return found

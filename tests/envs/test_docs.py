"""The blocks of docs/environments.md run, one after the other, as a reader would run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "environments.md"


def test_every_block_of_the_page_runs(tmp_path, monkeypatch):
    """In a directory of their own, in one namespace, each block without an error."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    namespace: dict[str, object] = {"__name__": "docs"}
    for number, block in enumerate(blocks, 1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), namespace)

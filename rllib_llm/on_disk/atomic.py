"""Writing files that others read while we run, or after we were killed."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_whole"]


def write_whole(file: Path, text: str) -> None:
    """Replace a file in one step: whoever is killed, or meets a full disk, leaves the old content or the new."""
    part = file.with_name(f"{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)

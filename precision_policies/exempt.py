"""Exempt patterns: stated semantics, resolved to module names once, so that both sides receive names.

A pattern is compared with the whole dotted name, part by part: `*` is any text and `?` any character inside
one part, `**` as a whole part is any number of parts (also none). Nothing else is special. So `**.mlp.gate`
is the router of every layer and never `mlp.gate_proj`, and `q_proj` alone matches nothing: write `**.q_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from .errors import Violation, closest


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The regular expression (for fullmatch) that a pattern stands for."""
    pieces: list[str] = []
    parts = pattern.split(".")
    for index, part in enumerate(parts):
        last = index == len(parts) - 1
        if part == "**":
            pieces.append(r"(?:[^.]+(?:\.[^.]+)*)" if last else r"(?:[^.]+\.)*")
            continue
        text = "".join({"*": "[^.]*", "?": "[^.]"}.get(c, re.escape(c)) for c in part)
        pieces.append(text if last else text + r"\.")
    return re.compile("".join(pieces))


def resolve_patterns(patterns: Sequence[str], names: Iterable[str]) -> tuple[dict[str, str], list[Violation]]:
    """name -> the pattern that first matched it, and a violation for each pattern that matched nothing."""
    names, violations = list(names), []
    matched: dict[str, str] = {}
    for index, pattern in enumerate(patterns):
        expression, hit = compile_pattern(pattern), False
        for name in names:
            if expression.fullmatch(name):
                hit = True
                matched.setdefault(name, pattern)
        if not hit:
            violations.append(_unmatched(index, pattern, names))
    return matched, violations


def _unmatched(index: int, pattern: str, names: Sequence[str]) -> Violation:
    bare = sorted({name.rsplit(".", 1)[-1] for name in names})
    suffix = pattern.rsplit(".", 1)[-1]
    if "." not in pattern and suffix in bare:
        hint = f" (did you mean '**.{pattern}'? patterns are compared with whole names)"
    else:
        hint = closest(suffix, bare) if suffix not in bare else ""
    problem = f"matches no linear module of this model{hint}"
    remedy = f"'**.NAME' with NAME one of {', '.join(bare)}; or remove the pattern"
    return Violation(f"exempt.modules[{index}]", pattern, problem, remedy)

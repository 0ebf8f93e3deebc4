"""The process that runs math-verify for `MathChecker`. Started by path, reads and writes one JSON per line.

It is a process because math-verify's own timeouts are signals, which do not work in the worker threads of Ray, and
because an answer like 9**9**9**9 stops for nothing but a kill. Imports nothing of this package.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import signal
import sys
from typing import Any

MEMORY_BYTES = 4 * 2**30
RELATIVE = (
    1e-12  # two exact values are one up to this; math-verify itself compares absolutely, so that 1e-30 is 0
)
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")


def check(gold: str, answer: str, prose: bool) -> bool:
    """Whether two formulas are equal, read as LaTeX. Prose is searched, and its gold may be plain.

    A bare formula is not searched: math-verify would find the 6 of "5 # 6".
    """
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # The caller has taken units from a bare formula; math-verify would take "ab" from "2ab".
    rules = NormalizationConfig(
        True, units=prose, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    targets: list[Any] = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=rules)]
    targets += [ExprExtractionConfig()] if prose else []

    def read(text: str) -> list[Any]:
        return list(parse(text, targets, parsing_timeout=None))

    def latex(text: str) -> str:
        return text if any(sign in text for sign in DELIMITERS) else f"${text}$"

    golds = read(latex(gold)) or read(gold)
    forms = [answer] if prose else [latex(answer)]
    return any(
        verify(golds, answers, timeout_seconds=None, allow_set_relation_comp=not prose)
        and not _differ(golds, answers)
        for answers in map(read, forms)
        if golds and answers
    )


def _differ(golds: list[Any], answers: list[Any]) -> bool:
    """Whether the two are numbers, or containers of numbers, of different size relative to themselves."""
    from sympy import Basic, MatrixBase

    first, second = golds[0], answers[0]
    if not all(isinstance(value, (Basic, MatrixBase)) for value in (first, second)):
        return False
    return _numbers_differ(first, second)


def _numbers_differ(first: Any, second: Any) -> bool:
    from sympy import Float, MatrixBase, Tuple

    if isinstance(first, (MatrixBase, Tuple)) and type(first) is type(second):
        return any(_numbers_differ(a, b) for a, b in zip(list(first), list(second), strict=False))
    try:
        if first.free_symbols or second.free_symbols:
            return False
        a, b = first.doit().evalf(40), second.doit().evalf(40)
        if not (a.is_number and b.is_number):
            return False
        scale = max(abs(a), abs(b))
        if scale == 0:
            return False
        tolerance = RELATIVE * scale
        if first.has(Float) != second.has(Float):
            tolerance = 0.5 * 10.0 ** -(6 if scale >= 0.1 else 5 - math.floor(math.log10(scale)))
        return bool(abs(a - b) > tolerance) and not _percentages(first, second)
    except (AttributeError, TypeError, ValueError, OverflowError):
        return False


def _percentages(first: Any, second: Any) -> bool:
    """Whether one is written as a percentage, which math-verify calls equal to its number ("28%" and "28")."""
    from sympy import Rational, UnevaluatedExpr

    hundredth = UnevaluatedExpr(Rational(1, 100))
    return hundredth in getattr(first, "args", ()) or hundredth in getattr(second, "args", ())


def main() -> None:
    """Answer requests from stdin, one JSON object a line, until it is closed."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)  # "Timeout is disabled": the parent has one
    for line in sys.stdin:
        request = json.loads(line)
        # The parent kills this process at the timeout; should the parent be gone, SIGALRM's default action does.
        signal.alarm(math.ceil(request["seconds"]) + 5)
        reply: dict[str, bool | str]
        try:
            reply = {"equal": check(request["gold"], request["answer"], request["prose"])}
        except (Exception, MemoryError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

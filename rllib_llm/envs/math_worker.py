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

MEMORY_BYTES = 4 * 2**30


def check(gold: str, answer: str) -> bool:
    """Whether two texts are the same number or expression: plain, or LaTeX with or without $…$ or \\boxed{}."""
    from math_verify import parse, verify

    forms = [[parse(form, parsing_timeout=None) for form in (text, f"${text}$")] for text in (gold, answer)]
    if not any(forms[0]):
        return gold.strip() == answer.strip()
    return any(
        verify(g, a, timeout_seconds=None, raise_on_error=False)
        for g in forms[0]
        for a in forms[1]
        if g and a
    )


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)  # "Timeout is disabled": the parent has one
    for line in sys.stdin:
        request = json.loads(line)
        # The parent kills this process at the timeout; should the parent be gone, SIGALRM's default action does.
        signal.alarm(math.ceil(request["seconds"]) + 5)
        reply: dict[str, bool | str]
        try:
            reply = {"equal": check(request["gold"], request["answer"])}
        except (Exception, MemoryError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()

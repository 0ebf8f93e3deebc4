"""One closing line for several pytest runs: `python tests/total.py core=build/core.xml vllm=build/vllm.xml`.

Prints "N passed, N failed" over the JUnit reports of all parts, alone on its line, after a line for each part that
wrote no report. Such a part counts as one failure. The exit status is 0 when nothing failed and something passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from pathlib import Path


def counts(report: Path) -> tuple[int, int]:
    """(passed, failed) of a JUnit report as pytest writes it; an error of a fixture or of a collection is a failure."""
    passed = failed = 0
    for test in ET.parse(report).getroot().iter("testcase"):
        outcomes = {child.tag for child in test}
        if outcomes & {"failure", "error"}:
            failed += 1
        elif "skipped" not in outcomes:
            passed += 1
    return passed, failed


def main(parts: list[str]) -> int:
    """Print the total of `parts`, each "name=path of its report"."""
    passed = failed = 0
    for part in parts:
        name, _, path = part.partition("=")
        try:
            more_passed, more_failed = counts(Path(path))
        except (OSError, ET.ParseError) as error:
            print(f"{name}: no report, so it was not run or was killed ({error})")
            more_passed, more_failed = 0, 1
        passed += more_passed
        failed += more_failed
    print(f"{passed} passed, {failed} failed")
    return 0 if passed and not failed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What `make test` relies on: a test that hangs or kills its process fails alone, and all parts are counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import total

ROOT = Path(__file__).resolve().parents[1]

FAULTY = """
import os, time, pytest

def test_before(): pass

@pytest.mark.timeout(1)
def test_hangs(): time.sleep(1200)

def test_dies(): os._exit(3)

def test_after(): pass

@pytest.mark.skip
def test_skipped(): pass

@pytest.fixture
def broken():
    yield
    raise OSError

def test_teardown(broken): pass
"""


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(stdout, JUnit report) of a run with this project's conftest and scheduler over FAULTY."""
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "test_faulty.py").write_text(FAULTY)
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "1", "--dist", "loadfile"]
    command += ["--timeout-method=signal", f"--junit-xml={report}", "-q", "-rA"]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=folder, env=inherited | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout, report


def test_a_test_that_hangs_or_dies_fails_alone(faulty: tuple[str, Path]) -> None:
    """The time limit ends one test, a worker's death is one failure of the test that it ran, and the others run on."""
    out, _ = faulty
    assert "FAILED test_faulty.py::test_hangs - Failed: Timeout" in out
    # Counted by the summary's lines: where the variable CI is set, pytest repeats the whole message in them.
    failed = [line.split()[1] for line in out.splitlines() if line.startswith("FAILED ")]
    assert sorted(failed) == ["test_faulty.py::test_dies", "test_faulty.py::test_hangs"]
    assert "crashed while running 'test_faulty.py::test_dies'" in out
    for name in ("before", "after", "teardown"):
        assert f"PASSED test_faulty.py::test_{name}" in out
    assert "2 failed, 3 passed, 1 skipped, 1 error" in out


def test_the_total_counts_all_parts(
    faulty: tuple[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Errors are failures, skipped tests are neither, and a part without a report is a failure by name."""
    _, report = faulty
    good = tmp_path / "good.xml"
    good.write_text(
        "<testsuites><testsuite><testcase/><testcase><skipped/></testcase></testsuite></testsuites>"
    )
    assert total.counts(report) == (
        2,
        3,
    )  # the test whose teardown broke is a failure, and not a pass as well
    assert total.main([f"a={good}", f"b={report}"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 passed, 3 failed"
    assert total.main([f"a={good}", f"vllm={tmp_path}/none.xml"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("vllm: no report")
    assert lines[-1] == "1 passed, 1 failed"
    assert total.main([f"a={good}"]) == 0
    nothing = tmp_path / "nothing.xml"
    nothing.write_text("<testsuites><testsuite><testcase><skipped/></testcase></testsuite></testsuites>")
    assert total.main([f"a={nothing}"]) == 1

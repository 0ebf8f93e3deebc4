"""Raw results: what is written is what is read, from JSON lines or CSV, whole or broken off."""

import json
import math

import pytest

from rllib_llm.compare import CurvesError, CurveWriter, read_curves


def test_what_is_written_is_read(tmp_path):
    """Rows, statuses and the description come back; iterations are in order whatever the order of writing."""
    writer = CurveWriter(tmp_path)
    writer.row("bf16", 1, 2, {"a/b": 0.25})
    writer.row("bf16", 1, 1, {"a/b": 0.1 + 0.2, "loss": math.nan})
    writer.status("bf16", 1, "failed", "ValueError: no")
    writer.describe(title="T")
    curves = read_curves(tmp_path)
    [run] = curves.runs
    assert (run.arm, run.seed, run.status, run.reason, run.last_iteration) == (
        "bf16",
        1,
        "failed",
        "ValueError: no",
        2,
    )
    assert run.series("a/b") == {1: 0.1 + 0.2, 2: 0.25}
    assert math.isnan(run.series("loss")[1])
    assert list(run.series("loss")) == [1]
    assert curves.description["title"] == "T"
    assert not list(tmp_path.glob("*.part"))


def test_json_lines_and_csv_give_the_same(tmp_path):
    """An empty cell is "not measured", nan and inf are measurements, in both formats."""
    (tmp_path / "j").mkdir()
    (tmp_path / "c").mkdir()
    (tmp_path / "j" / "curves.jsonl").write_text(
        '{"arm": "x", "seed": 0, "iteration": 1, "r": 1.5, "g": null}\n'
        '{"arm": "x", "seed": 0, "iteration": 2, "g": Infinity}\n'
    )
    (tmp_path / "c" / "curves.csv").write_text("arm,seed,iteration,r,g\nx,0,1,1.5,\nx,0,2,,inf\n")
    assert read_curves(tmp_path / "j").runs == read_curves(tmp_path / "c").runs
    assert read_curves(tmp_path / "c").runs[0].rows == {1: {"r": 1.5}, 2: {"g": math.inf}}


def test_a_run_may_go_on_in_another_file(tmp_path):
    """Files are read in order of name and a later row of the same iteration counts: a resumed run repeats some."""
    (tmp_path / "curves-1.jsonl").write_text(
        "".join(json.dumps({"arm": "x", "seed": 0, "iteration": i, "r": 1.0}) + "\n" for i in (1, 2, 3))
    )
    (tmp_path / "curves-2.csv").write_text("arm,seed,iteration,r\nx,0,3,7\nx,0,4,8\n")
    assert read_curves(tmp_path).runs[0].series("r") == {1: 1.0, 2: 1.0, 3: 7.0, 4: 8.0}


def test_a_line_without_its_end_is_left_out_and_written_past(tmp_path):
    """A process that is killed while it writes costs one row, and the next writer begins a new line."""
    writer = CurveWriter(tmp_path)
    writer.row("x", 0, 1, {"r": 1.0})
    file = tmp_path / "curves.jsonl"
    file.write_text(file.read_text() + '{"arm": "x", "seed": 0, "itera')
    assert list(read_curves(tmp_path).runs[0].rows) == [1]
    CurveWriter(tmp_path).row("x", 0, 2, {"r": 2.0})
    assert read_curves(tmp_path).runs[0].series("r") == {1: 1.0, 2: 2.0}


def test_a_whole_line_without_its_newline_is_kept(tmp_path):
    """Only what cannot be read is cut away, also when nothing stands before it."""
    file = tmp_path / "curves.jsonl"
    file.write_text('{"arm": "x", "seed": 0, "iteration": 1, "r": 1.0}')
    CurveWriter(tmp_path).row("x", 0, 2, {"r": 2.0})
    assert read_curves(tmp_path).runs[0].series("r") == {1: 1.0, 2: 2.0}
    file.write_text('{"arm": "x", "se')
    CurveWriter(tmp_path).row("x", 0, 3, {"r": 3.0})
    assert read_curves(tmp_path).runs[0].series("r") == {3: 3.0}


def test_a_byte_order_mark_is_no_data(tmp_path):
    """CSV and JSON lines that a Windows program has saved are read like others."""
    (tmp_path / "curves1.csv").write_text("arm,seed,iteration,r\nx,0,1,1\n", encoding="utf-8-sig")
    (tmp_path / "curves2.jsonl").write_text(
        '{"arm": "x", "seed": 0, "iteration": 2, "r": 2}\n', encoding="utf-8-sig"
    )
    assert read_curves(tmp_path).runs[0].series("r") == {1: 1.0, 2: 2.0}


def test_files_of_other_kinds_are_told_not_crashed_on(tmp_path):
    """Bytes that are no text, numbers that no float holds, and a description of other types: one error for all."""
    (tmp_path / "curves1.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "curves2.jsonl").write_text(f'{{"arm": "x", "seed": 0, "iteration": 1, "r": {10**400}}}\n')
    (tmp_path / "compare.json").write_text(
        '{"title": 5, "baseline": ["x"], "planned": {"arms": [3], "seeds": "two", "iterations": "10"},'
        ' "arms": {"x": 3}, "runs": [{"arm": ["x"], "seed": {}, "status": "finished"}]}'
    )
    with pytest.raises(CurvesError) as caught:
        read_curves(tmp_path)
    assert len(caught.value.problems) == 9
    for part in (
        "curves1.jsonl: cannot be read as UTF-8", "r = '1000", "title = '5'", "baseline must be a text",
        "planned.arms[0] = '3'", "planned.seeds = 'two'",
        "planned.iterations = '10'", "arms.x = '3'", "runs[0] has arm = ['x']",
    ):  # fmt: skip
        assert part in str(caught.value)


def test_all_problems_are_listed_with_their_lines(tmp_path):
    """Wrong types, missing keys and an unknown status are one error, each with file and line."""
    (tmp_path / "curves.jsonl").write_text(
        '{"arm": "", "seed": 0, "iteration": 1}\n{"arm": "x", "seed": "0", "iteration": 0}\n[1]\n'
        '{"arm": "x", "seed": 0, "iteration": 1, "r": "high"}\n'
    )
    (tmp_path / "compare.json").write_text(
        '{"schema": "other/9", "runs": [{"arm": "x"}, {"arm": "x", "seed": 0, "status": "lost"}], "arms": []}'
    )
    with pytest.raises(CurvesError) as caught:
        read_curves(tmp_path)
    text = str(caught.value)
    assert len(caught.value.problems) == 9
    for part in (
        "line 1: arm = ''", "line 2: seed = '0'", "line 2: iteration = 0", "line 3: must be an object",
        "line 4: r = 'high'", "schema = 'other/9'", "arms must be an object", "runs[0] needs",
        "runs[1].status = 'lost'",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        (None, "", "no curves"),
        ("curves.jsonl", "", "no complete row"),
        ("curves.jsonl", f'{{"arm": {"9" * 5000}}}\n{{}}\n', "line 1: no JSON .*4300 digits"),
        ("curves.jsonl", "[" * 100_000 + "\n{}\n", "line 1: no JSON .*recursion"),
        ("curves.csv", "arm,iteration\nx,1\n", "no column seed"),
        ("curves.csv", "arm,seed,iteration\nx,0,1,9\n", "line 2: more cells"),
        ("curves.csv", "arm,seed,iteration,r\nx,0,1.5,9\n", "iteration = 1.5"),
    ],
)
def test_a_directory_without_usable_rows_says_so(tmp_path, name, content, match):
    """Nothing is guessed from a file that is no curve file."""
    if name:
        (tmp_path / name).write_text(content)
    with pytest.raises(CurvesError, match=match):
        read_curves(tmp_path)


@pytest.mark.parametrize("content", ["{", "9" * 5000, "[" * 100_000])
def test_a_description_that_is_no_json_is_a_problem_by_name(tmp_path, content):
    """Cut off, with a number that Python does not read, or nested beyond its stack."""
    (tmp_path / "curves.jsonl").write_text('{"arm": "x", "seed": 0, "iteration": 1}\n')
    (tmp_path / "compare.json").write_text(content)
    with pytest.raises(CurvesError, match=r"compare\.json: no JSON"):
        read_curves(tmp_path)


def test_without_a_status_the_plan_decides(tmp_path):
    """A run with all planned iterations is finished, a shorter one is under way; arms keep the planned order."""
    (tmp_path / "curves.csv").write_text("arm,seed,iteration,r\na,0,1,1\nz,0,1,1\nz,0,2,1\n")
    (tmp_path / "compare.json").write_text('{"planned": {"arms": ["z", "a"], "iterations": 2}}')
    curves = read_curves(tmp_path)
    assert [(run.arm, run.status) for run in curves.runs] == [("z", "finished"), ("a", "running")]

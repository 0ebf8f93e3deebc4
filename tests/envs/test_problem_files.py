from __future__ import annotations

import json

import pytest

from rllib_llm.envs import EnvConfigError, make_env

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(50)]


def write(path, *lines):
    data = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line)).encode()
        for line in lines
    ]
    path.write_bytes(b"\n".join(data))
    return str(path)


def factory(path, eval_path=None, tmp_path=None, **options):
    if eval_path is None:
        eval_path = write(path.parent / "held_out.jsonl", {"question": "held out?", "answer": 1})
    return make_env("jsonl_math", {"path": str(path), "eval_path": str(eval_path), **options})


def problems(made):
    return {p.question: p.answer for p in map(made.problem, range(made.num_problems))}


BAD_LINES = {
    "deep nesting": b'{"question": "q?", "answer": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a lone surrogate in the question": b'{"question": "q\\ud800?", "answer": 1}',
    "a lone surrogate in the answer": b'{"question": "q?", "answer": "\\udc00"}',
    "NUL": b'{"question": "q\\u0000?", "answer": 1}',
    "NUL in the answer": b'{"question": "q?", "answer": "1\\u0000"}',
    "not UTF-8": b'{"question": "q\xff?", "answer": 1}',
    "cut": b'{"question": "q?", "ans',
    "an array": b"[1, 2]",
    "a number": b"12",
    "NaN": b'{"question": "q?", "answer": NaN}',
    "Infinity": b'{"question": "q?", "answer": -Infinity}',
    "nan as text": b'{"question": "q?", "answer": "nan"}',
    "inf as text": b'{"question": "q?", "answer": "+Inf"}',
    "a large exponent": b'{"question": "q?", "answer": 1e999999}',
    "a key twice": b'{"question": "q?", "answer": 1, "answer": 2}',
    "no answer": b'{"question": "q?"}',
    "null": b'{"question": "q?", "answer": null}',
    "a list as answer": b'{"question": "q?", "answer": [1]}',
    "true": b'{"question": "q?", "answer": true}',
    "a number as question": b'{"question": 5, "answer": 1}',
    "two questions": b'{"question": "q?", "prompt": "q?", "answer": 1}',
    "an unknown comparison": b'{"question": "q?", "answer": 1, "compare": "maths"}',
    "text where a number is read": b'{"question": "q?", "answer": "no"}',
    "a time where a number is read": b'{"question": "q?", "answer": "12:00"}',
    "a list where a number is read": b'{"question": "q?", "answer": "1, 2"}',
    "text compared as number": b'{"question": "q?", "answer": "5 or 6", "compare": "number"}',
    "many digits": b'{"question": "q?", "answer": ' + b"1" * 5000 + b"}",
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named_and_no_traceback(tmp_path, line):
    """Whatever a line holds, the message is "line 2: …" and no other line is complained about."""
    path = tmp_path / "p.jsonl"
    write(path, {"question": "good?", "answer": 1}, line, {"question": "good too?", "answer": 2})
    with pytest.raises(EnvConfigError) as error:
        factory(path)
    lines = str(error.value).splitlines()
    assert lines[0].endswith("1 malformed:")
    assert lines[1].startswith("line 2: ")
    assert len(lines) == 2
    assert len(lines[1]) < 400


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("boxed", "\\frac{1}{2"),
        ("boxed", "a}b{c"),
        ("tag", "x</answer>y"),
        ({"kind": "marker", "marker": "#"}, "5 # 6"),
        ({"kind": "whole", "until": "\n"}, "one\ntwo"),
        ({"kind": "marker", "until": "."}, "J. Smith"),
        ("last_number", "x"),
        ("last_number", "1, 2"),
        ("last_number", "July 4, 1776"),
        ("last_number", "2\\pi"),
        ("last_number", "3:4"),
    ],
)
def test_a_row_that_can_never_be_earned_is_refused(tmp_path, answer, gold):
    """Where the answer, written as asked, is read as something else, the line is refused with both texts."""
    path = tmp_path / "p.jsonl"
    write(path, {"question": "a?", "answer": gold}, {"question": "b?", "answer": "7"})
    with pytest.raises(EnvConfigError, match=r"line 1: the answer .* can never be earned") as error:
        factory(path, answer=answer)
    assert "line 2" not in str(error.value)


@pytest.mark.parametrize(
    "gold", ["no", "12:00", "2\\pi", "1, 2", "x = 5", "July 4, 1776", "(1, 2)", "5 m", "-0.00001"]
)
@pytest.mark.parametrize("answer", ["boxed", "tag", "whole", "marker"])
def test_every_kind_of_answer_can_be_earned(tmp_path, answer, gold):
    """With a kind that keeps the whole text, the gold itself is paid."""
    path = tmp_path / "p.jsonl"
    write(path, {"question": "a?", "answer": gold})
    made = factory(path, answer=answer)
    env = made()
    env.reset(0)
    assert env.step(made.extract.written(gold)).reward == 1.0


def test_identical_rows_are_dropped_and_counted(tmp_path, caplog):
    """Repeated rows train once; their number is in the log. duplicates: refuse names them."""
    path = tmp_path / "p.jsonl"
    rows = [
        {"question": "a?", "answer": "1,500"},
        {"question": "b?", "answer": 2},
        {"question": " a?\u200b", "answer": "1500"},
        {"question": "b?", "answer": 2},
    ]
    write(path, *rows)
    with caplog.at_level("WARNING"):
        assert problems(factory(path)) == {"a?": "1,500", "b?": "2"}
    assert "2 identical lines dropped" in caplog.text
    with pytest.raises(EnvConfigError, match="line 3: the same question as line 1"):
        factory(path, duplicates="refuse")


@pytest.mark.parametrize("question", ["a ?", "a  ?", "\u00a0a ?", "a\u200b ?", "ａ ?", "a\n?"])
def test_the_same_question_with_another_answer_is_refused(tmp_path, question):
    """Questions are the same up to NFKC, invisible characters and whitespace; train and held-out are kept apart so."""
    path, held_out = tmp_path / "p.jsonl", tmp_path / "e.jsonl"
    write(path, {"question": "a ?", "answer": 1}, {"question": question, "answer": 2})
    with pytest.raises(EnvConfigError, match="line 2: the same question as line 1 with another answer"):
        factory(path)
    write(path, {"question": "a ?", "answer": 1})
    write(held_out, {"question": "b?", "answer": 1}, {"question": question, "answer": 1})
    with pytest.raises(EnvConfigError, match=r"shares 1 problems .*2=1"):
        factory(path, held_out)


def test_the_log_says_how_answers_are_compared(tmp_path, caplog):
    """One line per file, and each prompt's info, name the comparison; a row may choose its own."""
    path = tmp_path / "p.jsonl"
    rows = [("a?", "5", None), ("b?", "2\\pi", None), ("c?", "yes", None), ("d?", "7", "text")]
    write(path, *[{"question": q, "answer": a} | ({"compare": c} if c else {}) for q, a, c in rows])
    with caplog.at_level("INFO"):
        made = factory(path, answer="whole")
    assert "1 as math, 1 as number, 2 as text" in caplog.text
    kinds = {made.problem(i).question: made().reset(i).info["compare"] for i in range(4)}
    assert kinds == {"a?": "number", "b?": "math", "c?": "text", "d?": "text"}


def test_numbers_of_json_are_kept_as_written(tmp_path):
    """0.00001 is not 1e-05, and a large integer is not a float."""
    path = tmp_path / "p.jsonl"
    write(
        path,
        '{"question": "a?", "answer": 0.00001}',
        '{"question": "b?", "answer": 1e22}',
        '{"question": "c?", "answer": 12345678901234567890123}',
    )
    assert problems(factory(path)) == {"a?": "0.00001", "b?": "1e22", "c?": "12345678901234567890123"}


def test_a_byte_order_mark_and_line_ends_of_windows_are_read(tmp_path):
    """As editors write them."""
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"question": "a?", "answer": 1}\r\n\r\n{"question": "b?", "answer": 2}\r\n'
    )
    assert problems(factory(path)) == {"a?": "1", "b?": "2"}


def arrow_stream(path, table):
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def save_to_disk(directory, table, shards=2):
    """The files of `Dataset.save_to_disk`."""
    directory.mkdir(parents=True)
    size = -(-table.num_rows // shards)
    names = [f"data-{i:05d}-of-{shards:05d}.arrow" for i in range(shards)]
    for i, name in enumerate(names):
        arrow_stream(directory / name, table.slice(i * size, size))
    (directory / "dataset_info.json").write_text("{}")
    (directory / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))


@pytest.mark.parametrize("kind", ["parquet", "arrow", "saved", "parquet directory", "jsonl directory"])
def test_other_files_hold_the_same_rows(tmp_path, kind):
    """Parquet, Arrow, what `datasets` saved, and directories of files."""
    table = pa.Table.from_pylist(ROWS)
    path = tmp_path / {"parquet": "p.parquet", "arrow": "p.arrow"}.get(kind, "p")
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=7)
    elif kind == "arrow":
        arrow_stream(path, table)
    elif kind == "saved":
        save_to_disk(path, table)
    else:
        path.mkdir()
        for i, part in enumerate((table.slice(0, 30), table.slice(30))):
            if kind == "parquet directory":
                pa.parquet.write_table(part, path / f"train-{i}.parquet", row_group_size=7)
            else:
                write(path / f"train-{i}.jsonl", *part.to_pylist())
    assert problems(factory(path)) == {row["question"]: row["answer"] for row in ROWS}


def test_columns_are_named_by_option(tmp_path):
    """Also fields of nested columns, as verl's files have them, and numbers."""
    rows = [{"text": f"{i}?", "reward_model": {"ground_truth": i, "style": "rule"}} for i in range(5)]
    path = tmp_path / "p.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    held_out = tmp_path / "e.parquet"
    pa.parquet.write_table(pa.Table.from_pylist([rows[0] | {"text": "held out"}]), held_out)
    columns = {"question": "text", "answer": "reward_model.ground_truth"}
    assert problems(factory(path, held_out, columns=columns)) == {f"{i}?": str(i) for i in range(5)}
    with pytest.raises(EnvConfigError, match="did you mean 'question'"):
        factory(path, held_out, columns={"qestion": "text"})
    with pytest.raises(EnvConfigError, match="row 1: 'no' must be a non-empty string"):
        factory(path, held_out, columns={"question": "text", "answer": "no"})


def test_bad_rows_of_parquet_are_named(tmp_path):
    """A null, NaN or answer that cannot be read is "row n: …"."""
    path = tmp_path / "p.parquet"
    rows = [
        {"question": "a?", "answer": 1.0},
        {"question": "b?", "answer": None},
        {"question": "c?", "answer": float("nan")},
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    with pytest.raises(EnvConfigError) as error:
        factory(path)
    assert [line.split(":")[0] for line in str(error.value).splitlines()[1:]] == ["row 2", "row 3"]


@pytest.mark.parametrize(
    "kind", ["no parquet", "cut parquet", "no arrow", "empty directory", "splits", "empty file", "bad state"]
)
def test_files_that_are_none_are_refused(tmp_path, kind):
    """Each with an EnvConfigError that names the file."""
    path = tmp_path / "p"
    if kind in ("no parquet", "cut parquet", "no arrow", "empty file"):
        path = tmp_path / {"no arrow": "p.arrow", "empty file": "p.jsonl"}.get(kind, "p.parquet")
        pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "good.parquet")
        good = (tmp_path / "good.parquet").read_bytes()
        path.write_bytes(
            {"cut parquet": good[: len(good) // 2], "empty file": b""}.get(kind, b"no such format")
        )
    elif kind == "splits":
        save_to_disk(path / "train", pa.Table.from_pylist(ROWS))
        (path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    else:
        path.mkdir()
        if kind == "bad state":
            (path / "state.json").write_text("{")
            (path / "data-0.arrow").write_bytes(b"x")
    with pytest.raises(EnvConfigError) as error:
        factory(path)
    assert str(path) in str(error.value)


def test_a_file_that_changes_while_it_is_used_is_noticed(tmp_path):
    """Rows are read again when asked for; another row in their place is an error, not another problem."""
    path = tmp_path / "p.jsonl"
    write(path, *ROWS)
    made = factory(path)
    write(path, *[row | {"question": row["question"] + "!"} for row in ROWS])
    with pytest.raises(EnvConfigError, match="changed after it was read"):
        problems(made)


def test_few_shot_rows_are_not_held_in_memory_but_found(tmp_path):
    """Examples come from the file as well."""
    path = tmp_path / "p.jsonl"
    write(path, *ROWS)
    made = factory(path, prompt={"few_shot": 3})
    assert made.num_problems == len(ROWS) - 3
    assert len(made.shots) == 3

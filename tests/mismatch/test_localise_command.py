"""`rllib-llm mismatch localise`: exit status, table, JSON, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rllib_llm.cli.main import main


def run(*arguments: str) -> int:
    return main(["mismatch", "localise", "--model", "tiny-chain", *arguments])


def test_cli_equal_is_0(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The shipped model under unified-fp8, prompts from a file and the command line, training too: exit status 0."""
    file = tmp_path / "prompts.txt"
    file.write_text("7 - 2 =\n\n4 + 4 =\n")
    assert (
        run("--policy", "unified-fp8", "--prompts", str(file), "--prompt", "3 + 4 =", "--max-new-tokens", "3")
        == 0
    )
    out = capsys.readouterr().out
    assert "EQUAL" in out
    assert re.search(r"compared +199 operator outputs, 0 of them differ", out)


def test_cli_different_is_3_and_names_the_operator(capsys: pytest.CaptureFixture[str]) -> None:
    """The mixed policy: exit status 3, operator, elements, ulps and token in the table; --all has every operator."""
    arguments = ("--policy", "mixed-bf16-fp8", "--prompt", "3 + 4 =", "--max-new-tokens", "2")
    assert run(*arguments) == 3
    out = capsys.readouterr().out
    assert "FIRST DIFFERENCE: model.layers.0.self_attn.q_proj (learner: invariant_matmul, rollout:" in out
    assert re.search(r"elements +\d+ of \d+ differ .* by up to \d+ ulp of bfloat16", out)
    assert "first at prompt 0, position 0 (prompt)" in out
    assert re.search(r"^> +model\.layers\.0\.self_attn\.q_proj ", out, re.M)
    assert "more (--all)" in out
    assert run(*arguments, "--all") == 3
    full = capsys.readouterr().out
    assert "model.layers.3.mlp.down_proj" in full
    assert "more (--all)" not in full


def test_cli_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--json prints one object with the same answer; token ids need no tokenizer; 0 new tokens is prefill only."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"token_ids": [1, 5, 9]}\n{"prompt": "3 + 4 ="}\n')
    common = ("--prompts", str(file), "--json")
    assert run("--policy", "bf16", *common, "--max-new-tokens", "0") == 0
    got = json.loads(capsys.readouterr().out)
    assert got["equal"] is True
    assert got["first"] is None
    assert (got["prompts"], got["new_tokens"]) == (2, 0)
    assert run("--policy", "mixed-bf16-fp8", *common, "--max-new-tokens", "2") == 3
    got = json.loads(capsys.readouterr().out)
    assert got["first"]["site"] == "model.layers.0.self_attn.q_proj"
    assert got["first"]["first"] == {"prompt": 0, "position": 0, "part": "prompt"}
    assert len(got["operators"]) > 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "bf16"], "no prompt"),
        (["--policy", "bf17", "--prompt", "x"], "bf17"),
        (["--policy", "bf16", "--prompt", "x", "--model", "no-such-dir"], "no-such-dir"),
        (["--policy", "bf16", "--prompts", "no-such-file"], "no-such-file"),
        (["--policy", "bf16", "--prompt", "x", "--engine", "tensorrt"], "one of torch, vllm"),
        (["--policy", "bf16", "--prompt", "x", "--engine", "vllm"], "vllm"),
        (["--policy", "bf16", "--prompt", "3 " * 600], "prompt"),
        (["--policy", "bf16", "--prompt", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["--policy", "bf16", "--prompt", "x", "--device", "tpu"], "--device tpu"),
    ],
)
def test_cli_bad_input_is_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be run says why on standard error, with exit status 2 and nothing on standard output."""
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_cli_lists_every_bad_line_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Five bad lines and a good one: all five are named, also a number and a depth that Python does not read."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "1 + 1 ="}\n{"token_ids": []}\nnot json\n{"prompt": 3}\n'
        + "9" * 5000
        + "\n"
        + "[" * 100_000
    )
    assert run("--policy", "bf16", "--prompts", str(file)) == 2
    err = capsys.readouterr().err
    assert [f"line {n}" in err for n in range(1, 7)] == [False, *[True] * 5]

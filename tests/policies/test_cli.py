"""`rllib-llm policy …`, mounted on a parser as the console script does."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from precision_policies import PolicyError, available, from_yaml, load_policy
from precision_policies.cli import add_policy_parser
from tests.policies.models import small


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory with nothing but a config."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small("qwen3", intermediate_size=500)))
    return folder


def run(*arguments: Any, **options: Any) -> int:
    """Exit status of one command."""
    parser = argparse.ArgumentParser(prog="rllib-llm")
    add_policy_parser(parser.add_subparsers(required=True), **options)
    args = parser.parse_args(["policy", *map(str, arguments)])
    return args.run(args)


def test_list_shows_every_policy_with_formats(capsys: pytest.CaptureFixture[str]) -> None:
    """One line per shipped policy, with the beginning of its fingerprint."""
    assert run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(available())
    for name, line in zip(available(), lines[1:], strict=True):
        assert line.split()[0] == name
        assert load_policy(name).fingerprint[:12] in line


@pytest.mark.parametrize("flags", [[], ["--plain"]])
def test_show_prints_yaml_that_loads_again(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The output of show is the policy, with or without comments."""
    assert run("show", "mixed-bf16-fp8", *flags) == 0
    text = capsys.readouterr().out
    assert from_yaml(text) == load_policy("mixed-bf16-fp8")
    assert ("#" in text) is not bool(flags)


def test_diff_speaks_and_equal_policies_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Consequences with their keys; or one line that both compute the same."""
    assert run("diff", "mixed-bf16-fp8", "bf16") == 0
    assert "rollout weights: e4m3 128×128 → bf16" in capsys.readouterr().out
    assert run("diff", "bf16", "bf16") == 0
    assert "same numbers" in capsys.readouterr().out


def test_check_reads_policies_and_training_configs(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name, a policy file, a config that names a policy, and one that holds an inline policy and a model."""
    policy = tmp_path / "p.yaml"
    policy.write_text("schema_version: 1\nextends: unified-fp8\nragged: exempt\n")
    inline = tmp_path / "c.yaml"
    inline.write_text(
        f"precision: {{extends: unified-fp8, ragged: exempt}}\nmodel: {model}\ntrain: {{lr: 1.0}}\n"
    )
    named = tmp_path / "n.yaml"
    named.write_text("precision: mixed-bf16-fp8\nmodel: ???\n")
    expected = {
        "unified-fp8": "yes, by construction",
        policy: "yes",
        inline: "exempt",
        named: "tis_token, upper 2",
    }
    for source, part in expected.items():
        assert run("check", source) == 0
        assert part in capsys.readouterr().out
    assert run("check", inline) == 0
    assert "6 exempt" in capsys.readouterr().out


def test_check_raises_everything_that_is_wrong(tmp_path: Path) -> None:
    """A bad policy in a training config raises PolicyError with all violations, for the caller's exit status."""
    path = tmp_path / "c.yaml"
    path.write_text("precision: {extends: bf16, ragged: crop, linear: {dgrad: fp9}}\n")
    with pytest.raises(PolicyError, match="2 violations"):
        run("check", path)


def test_plan_gathers_layers_or_lists_all(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By default alike modules share a line with their count; --all has one each; --json is the plan."""
    assert run("plan", "unified-fp8", "--model", model) == 0
    short = capsys.readouterr().out
    assert "model.layers.*.mlp.gate_proj" in short
    assert "512×256" in short, "the padded shape is not shown"
    assert run("plan", "unified-fp8", "--model", model / "config.json", "--all") == 0
    assert "model.layers.1.mlp.gate_proj" in capsys.readouterr().out
    assert run("plan", "unified-fp8", "--model", model, "--json") == 0
    plan = load_policy("unified-fp8").resolve(small("qwen3", intermediate_size=500))
    assert json.loads(capsys.readouterr().out) == plan.to_dict()


def test_graph_draws_and_reports(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture is written; mixed lists its differing edges gathered over layers."""
    assert run("graph", "mixed-bf16-fp8", "--model", model, "-o", tmp_path / "g.svg") == 0
    out = capsys.readouterr().out
    assert (tmp_path / "g.svg").stat().st_size > 10_000
    assert "50 edges differ" in out
    assert (
        "2 × model.layers.*.mlp.up_proj.weight -> model.layers.*.mlp.up_proj (W): training bf16, rollout e4m3"
        in out
    )


def test_schema_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON on standard output, or in a file with the line that editors need."""
    assert run("schema") == 0
    printed = json.loads(capsys.readouterr().out)
    assert run("schema", "-o", tmp_path / "s.json") == 0
    assert json.loads((tmp_path / "s.json").read_text()) == printed
    assert "yaml-language-server" in capsys.readouterr().out


def test_a_resolver_for_model_names_is_used(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The caller's resolver turns a name into a directory; without config.json there, the error names the model."""
    assert (
        run(
            "plan", "bf16", "--model", "tiny", model_path=lambda name: model if name == "tiny" else Path(name)
        )
        == 0
    )
    with pytest.raises(PolicyError, match=r"model = 'other'.*config\.json"):
        run("plan", "bf16", "--model", "other", model_path=Path)


def test_a_resolver_for_config_names_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check quickstart` reads the shipped training config; names of policies are not sent through the resolver."""
    (tmp_path / "quickstart.yaml").write_text("precision: mixed-bf16-fp8\n")
    assert run("check", "quickstart", config_path=lambda name: tmp_path / f"{name}.yaml") == 0
    assert "policy mixed-bf16-fp8" in capsys.readouterr().out
    assert run("check", "bf16", config_path=lambda name: 1 / 0) == 0


@pytest.mark.parametrize("command", ["list", "show", "diff", "check", "plan", "graph", "schema"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help of each command says more than its usage line."""
    with pytest.raises(SystemExit) as status:
        run(command, "--help")
    assert status.value.code == 0
    assert len(capsys.readouterr().out.splitlines()) >= 4


def test_files_that_cannot_be_read_or_written_are_violations(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is no text, and an output below a directory that is not there."""
    monkeypatch.chdir(tmp_path)  # relative names: a message shortens long paths, and tmp_path may be one
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(PolicyError, match=r"binary\.yaml': cannot be read"):
        run("check", "binary.yaml")
    for command in (["schema"], ["graph", "bf16", "--model", model]):
        with pytest.raises(PolicyError, match=r"x\.svg': cannot be written"):
            run(*command, "-o", "nowhere/x.svg")

"""Names, files, inheritance and schema versions."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from precision_policies import PolicyError, available, load_policy, migrations
from precision_policies.errors import Violation

HEAD = "schema_version: 1\n"


def write(folder: Path, name: str, text: str) -> Path:
    """A YAML file in `folder`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_seven_policies_are_shipped_each_with_a_head_comment() -> None:
    """All seven load, carry their file's name, and open with when to choose them and what they cost."""
    assert list(available()) == [
        "bf16",
        "fp16",
        "mixed-bf16-fp8",
        "unified-fp8",
        "unified-fp8-bf16-backward",
        "unified-fp8-fp16-backward",
        "unified-fp8-ue8m0",
    ]
    for name, path in available().items():
        head = path.read_text(encoding="utf-8").split("schema_version")[0].splitlines()
        assert all(line.startswith("#") for line in head), name
        text = " ".join(head)
        for part in ("Choose it", "It costs"):
            assert part in text, f"{name}: the head comment does not say '{part}'"
        policy = load_policy(name)
        assert policy.name == name
        assert policy.description


@pytest.mark.parametrize(
    ("name", "linear", "on_policy"),
    [
        ("bf16", ("bf16", "bf16", "bf16", "bf16", "bf16"), True),
        ("fp16", ("fp16", "fp16", "fp16", "fp16", "fp16"), True),
        ("mixed-bf16-fp8", ("bf16", "fp8", "bf16", "bf16", "bf16"), False),
        ("unified-fp8", ("fp8", "fp8", "fp8", "fp8", "fp8"), True),
        ("unified-fp8-bf16-backward", ("fp8", "fp8", "bf16", "bf16", "fp8"), True),
        ("unified-fp8-fp16-backward", ("fp8", "fp8", "fp16", "fp16", "fp8"), True),
        ("unified-fp8-ue8m0", ("fp8", "fp8", "fp8", "fp8", "fp8"), True),
    ],
)
def test_shipped_policies_say_what_their_names_say(
    name: str, linear: tuple[str, ...], on_policy: bool
) -> None:
    """Formats of the three GEMMs on both sides, and on-policyness."""
    p = load_policy(name)
    got = (p.linear.train_forward, p.linear.rollout_forward, p.linear.dgrad, p.linear.wgrad, p.linear.saved)
    assert got == linear
    assert p.exactly_on_policy is on_policy
    assert (p.master_dtype, p.operators) == ("float32", "shared")
    assert p.scale_format == ("ue8m0" if name.endswith("ue8m0") else "fp32")


def test_unified_halts_at_any_mismatch_and_mixed_corrects() -> None:
    """The guard of unified-fp8 is max_abs, 0, halt; mixed has token-level TIS on from the start."""
    guard, correction = load_policy("unified-fp8").guard, load_policy("mixed-bf16-fp8").correction
    assert (guard.metric, guard.tolerance, guard.action) == ("max_abs", 0.0, "halt")
    assert (correction.kind, correction.upper, correction.when) == ("tis_token", 2.0, "always")
    assert load_policy("unified-fp8").correction.kind == "none"


def test_a_file_needs_its_schema_version_and_a_mapping_does_not(tmp_path: Path) -> None:
    """A file outlives the program that it was written for, so it must say its version."""
    with pytest.raises(PolicyError, match="schema_version: missing"):
        load_policy(write(tmp_path, "a.yaml", "extends: bf16\n"))
    assert load_policy({"extends": "bf16"}).fingerprint == load_policy("bf16").fingerprint


def test_a_file_without_a_version_still_says_what_else_is_wrong(tmp_path: Path) -> None:
    """All violations at once: the missing version does not hide the others."""
    text = "extends: bf16\nmaster_dtype: fp9\nguard: {patience: 0}\ngaurd: {}\n"
    with pytest.raises(PolicyError) as refused:
        load_policy(write(tmp_path, "a.yaml", text))
    keys = [violation.key for violation in refused.value.violations]
    assert keys[0] == "schema_version"
    assert {"master_dtype", "guard.patience", "gaurd"} <= set(keys)
    with pytest.raises(PolicyError) as refused:
        load_policy(write(tmp_path, "b.yaml", "extends: bf16\n"))
    assert [violation.key for violation in refused.value.violations] == ["schema_version"]


@pytest.mark.parametrize(("version", "why"), [("2", "newer"), ("0", "ever was"), ("one", "whole number")])
def test_unknown_schema_versions_are_refused_with_what_to_write(
    version: str, why: str, tmp_path: Path
) -> None:
    """Too new, never existing and malformed versions are told apart."""
    with pytest.raises(PolicyError, match=why) as caught:
        load_policy(write(tmp_path, "a.yaml", f"schema_version: {version}\nextends: bf16\n"))
    assert "1" in caught.value.violations[0].remedy


def test_an_old_version_is_migrated_at_its_own_place_in_the_chain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration sees the partial tree of the old file only; new files above and below it stay as they are."""

    def from_0(tree: dict) -> dict:
        if tree.get("fp4"):
            problem = Violation("fp4", tree["fp4"], "no longer exists", "write linear: {train_forward: fp8}")
            raise PolicyError("policy", [problem])
        moved = {k: v for k, v in tree.items() if k != "uneven"}
        return {**moved, "ragged": tree["uneven"]} if "uneven" in tree else moved

    monkeypatch.setitem(migrations.MIGRATIONS, 0, from_0)
    write(tmp_path, "old.yaml", "schema_version: 0\nextends: unified-fp8\nuneven: refuse\n")
    child = load_policy(write(tmp_path, "new.yaml", HEAD + "extends: ./old.yaml\nguard: {patience: 3}\n"))
    assert (child.ragged, child.guard.patience, child.schema_version) == ("refuse", 3, 1)
    with pytest.raises(PolicyError, match="train_forward: fp8"):
        load_policy(write(tmp_path, "fp4.yaml", "schema_version: 0\nextends: bf16\nfp4: true\n"))
    with pytest.raises(PolicyError, match="uneven"):
        load_policy(write(tmp_path, "wrong.yaml", HEAD + "extends: bf16\nuneven: refuse\n"))


def test_a_cycle_of_files_is_shown_as_a_chain(tmp_path: Path) -> None:
    """a extends b extends a: refused with the chain, not a recursion error."""
    write(tmp_path, "a.yaml", HEAD + "extends: ./b.yaml\n")
    write(tmp_path, "b.yaml", HEAD + "extends: ./a.yaml\n")
    with pytest.raises(PolicyError, match=r"extends itself: .*a\.yaml -> .*b\.yaml -> .*a\.yaml"):
        load_policy(tmp_path / "a.yaml")


def test_a_chain_of_hundreds_is_refused(tmp_path: Path) -> None:
    """Inheritance has a depth limit, so generated files cannot exhaust the stack."""
    write(tmp_path, "0.yaml", HEAD + "extends: bf16\n")
    for i in range(1, 40):
        write(tmp_path, f"{i}.yaml", HEAD + f"extends: ./{i - 1}.yaml\n")
    with pytest.raises(PolicyError, match="more than 16"):
        load_policy(tmp_path / "39.yaml")


def test_relative_parents_are_looked_up_beside_the_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`extends: ./base.yaml` means the child's folder, wherever the program runs."""
    (tmp_path / "x").mkdir()
    write(tmp_path / "x", "base.yaml", HEAD + "extends: bf16\nragged: refuse\n")
    path = write(tmp_path / "x", "child.yaml", HEAD + "extends: ./base.yaml\n")
    monkeypatch.chdir("/")
    assert load_policy(path).ragged == "refuse"


def test_a_nested_omegaconf_node_works_like_a_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training config may hold a policy as a node, interpolations of its own included."""
    config = OmegaConf.create({"how": "refuse", "precision": {"extends": "unified-fp8", "ragged": "${how}"}})
    assert load_policy(config.precision).ragged == "refuse"
    broken = OmegaConf.create({"precision": {"extends": "unified-fp8", "ragged": "${nowhere}"}})
    with pytest.raises(PolicyError, match="nowhere"):
        load_policy(broken.precision)


def test_an_unknown_parent_is_named_with_the_closest_policy(tmp_path: Path) -> None:
    """A misspelt parent is reported as key `extends` of the file that says it."""
    with pytest.raises(
        PolicyError, match=r"child\.yaml.*\n.*extends = 'unified-fp9'.*did you mean 'unified-fp8'"
    ):
        load_policy(write(tmp_path, "child.yaml", HEAD + "extends: unified-fp9\n"))
    with pytest.raises(PolicyError, match="one parent"):
        load_policy({"extends": ["bf16", "fp16"]})


def test_duplicate_keys_are_refused(tmp_path: Path) -> None:
    """A key given twice is an error, not the last one wins."""
    with pytest.raises(PolicyError, match="duplicate"):
        load_policy(write(tmp_path, "a.yaml", HEAD + "extends: bf16\nragged: pad\nragged: refuse\n"))

"""Whatever stands in a file or on the command line: it is read, or refused with an error of its own kind."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from precision_policies import PolicyError, from_yaml
from precision_policies.errors import InputError
from rllib_llm.experiment.file import known_keys, load_experiment
from tests.random_examples import FACTOR

CASES = 60 * max(FACTOR, 1)
KEYS = [row[0] for row in known_keys()]
VALUES = st.one_of(
    st.sampled_from(
        [
            "[a]",
            "{}",
            "[]",
            "null",
            "~",
            ".nan",
            ".inf",
            "-.inf",
            "1e400",
            "-0",
            "0x1F",
            "1_000",
            "!!set",
            "!!python/name:os.system",
            "&a",
            "*a",
            "${x}",
            "${oc.env:HOME}",
            "''",
            "true",
            "no",
            "12:30:45",
            "???",
            "|-",
            ">",
            "@",
            "%",
            "`",
            ":",
            "[[",
            "}",
        ]
    ),
    st.integers(-(10**400), 10**400).map(str),
    st.floats().map(repr),
    st.text(max_size=20),
)
OVERRIDES = st.lists(
    st.tuples(
        st.one_of(
            st.sampled_from(KEYS),
            st.sampled_from(["train", "rollout", "precision", "run"]),
            st.text(max_size=9),
        ),
        st.sampled_from(["=", ":=", "", "=="]),
        VALUES,
    ).map("".join),
    max_size=4,
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
many = settings(
    max_examples=CASES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)


@many
@given(OVERRIDES)
def test_overrides_are_read_or_refused(overrides: list[str]) -> None:
    """`train=[a]`, 400 digits, tags, anchors: an experiment or an InputError."""
    with contextlib.suppress(InputError):
        load_experiment("quickstart", overrides)


@many
@given(
    st.dictionaries(
        st.sampled_from(sorted({key.partition(".")[0] for key in KEYS})) | st.text(max_size=9), PLAIN
    )
)
def test_experiment_files_are_read_or_refused(tmp_path: Path, tree: dict[str, object]) -> None:
    """Any YAML tree in an experiment file."""
    file = tmp_path / "experiment.yaml"
    file.write_text(json.dumps(tree), encoding="utf-8")
    with contextlib.suppress(InputError):
        load_experiment(str(file), [])


@many
@given(
    st.lists(
        st.tuples(st.sampled_from(["extends", "linear", "guard", "name", "kv_cache", "? a", "- "]), VALUES),
        max_size=4,
    )
)
def test_policies_are_read_or_refused(lines: list[tuple[str, str]]) -> None:
    """Any text as a policy."""
    with contextlib.suppress(PolicyError):
        from_yaml("schema_version: 1\n" + "\n".join(f"{key}: {value}" for key, value in lines))


@pytest.mark.parametrize("override", ["train=[a]", "precision=!!set {a}", "=", "train.lr"])
def test_known_bad_overrides_are_refused(override: str) -> None:
    """Inputs that once were something else than an InputError, or are nearest to one."""
    with pytest.raises(InputError):
        load_experiment("quickstart", [override]).to_grpo_config()

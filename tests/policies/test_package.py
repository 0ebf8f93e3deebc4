"""The package as a package: what it imports, and the JSON schema."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import precision_policies
from precision_policies import available, load_policy
from precision_policies.json_schema import json_schema

SCHEMA = json_schema()


PACKAGE = Path(precision_policies.__file__).parent
HEAVY = {"torch", "ray", "vllm", "transformers", "numpy", "networkx", "matplotlib", "mlflow"}


def test_using_policies_loads_no_heavy_library() -> None:
    """Loading, resolving and importing every module leaves torch, ray, vllm, networkx and matplotlib unloaded."""
    program = (
        "import sys, json\n"
        "from precision_policies import *; p = load_policy('unified-fp8'); p.fingerprint; p.to_yaml()\n"
        "import precision_policies.cli, precision_policies.graph, precision_policies.drawing\n"
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(json.loads(result.stdout))
    assert "precision_policies" in loaded
    assert not loaded & HEAVY


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda p: p.name)
def test_only_omegaconf_is_imported_outside_functions(path: Path) -> None:
    """At module level: standard library, omegaconf and the yaml it reads with. Inside functions: the drawing needs."""
    tree = ast.parse(path.read_text())
    everywhere, at_top = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {str(node.module).split(".")[0]}
        else:
            continue
        everywhere |= names
        at_top |= names if node in tree.body else set()
    assert at_top - set(sys.stdlib_module_names) <= {"omegaconf", "yaml"}
    assert everywhere - set(sys.stdlib_module_names) <= {"omegaconf", "yaml", "networkx", "matplotlib"}


def test_the_schema_is_a_schema_and_shipped_files_keep_it() -> None:
    """Valid JSON Schema; every shipped file as written, and every complete policy, validates."""
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for name, path in available().items():
        jsonschema.validate(yaml.safe_load(path.read_text()), SCHEMA)
        jsonschema.validate(load_policy(name).to_dict(), SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "schema_version: 1\nextends: bf16\ngaurd: {}",
        "schema_version: 1\nlinear: {dgrad: fp9}",
        "schema_version: 1\nguard: {patience: 0}",
        "schema_version: 1\nloss_scaling: {initial: x}",
        "schema_version: 2\nextends: bf16",
        "extends: bf16",
    ],
)
def test_the_schema_refuses_what_loading_refuses(text: str) -> None:
    """Unknown keys, bad choices, ranges, types and versions are seen by an editor already."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), SCHEMA)


def test_every_key_of_the_schema_has_a_description() -> None:
    """An editor can explain each key."""

    def check(node: dict, path: str) -> None:
        for key, entry in node.get("properties", {}).items():
            assert len(entry["description"]) > 5, f"{path}{key}"
            check(entry, f"{path}{key}.")

    check(SCHEMA, "")


def test_files_and_functions_are_short() -> None:
    """Files below 350 lines, functions below 40."""
    for path in PACKAGE.glob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) < 350, path.name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length < 40, f"{path.name}: {node.name} has {length} lines"

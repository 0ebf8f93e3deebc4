"""A wheel of the project is complete and works from any directory."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# directory in the repository -> where its files lie in a wheel
PLACES = {
    "precision_policies": "precision_policies",
    "policies": "precision_policies/shipped",
    "kernels": "precision_kernels",
    "rllib_llm": "rllib_llm",
    "configs": "rllib_llm/shipped_configs",
}
PROBE = """
import importlib, json, pkgutil
from precision_policies import load_policy
import precision_kernels, precision_policies, rllib_llm
from rllib_llm.experiment.file import load_experiment
from rllib_llm.models.paths import resolve_model_path
print(json.dumps({
    "files": [m.__file__ for m in (precision_kernels, precision_policies, rllib_llm)],
    "policy": load_policy("unified-fp8").fingerprint,
    "config": load_experiment("quickstart").model.path,
    "model": str(resolve_model_path("tiny-chain")),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy: in place, build/ would stay behind, and the next wheel would take its stale files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PLACES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (path,) = out.glob("rllib_llm-*.whl")
    return path


def test_wheel_holds_every_file(wheel):
    """Every module, shipped policy, shipped config and model file of the repository is in the wheel."""
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and (path.suffix in (".py", ".yaml", ".j2") or path.name == "py.typed" or "assets" in path.parts)
    }
    assert len(wanted) > 100
    assert wanted - held == set()
    assert not any(name.startswith(("tests/", "kernels/", "policies/", "configs/")) for name in held)


def test_wheel_works_from_any_directory(wheel, tmp_path):
    """Installed somewhere else, policies, configs and the shipped model are found through importlib.resources."""
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(file.startswith(str(site)) for file in found["files"])
    assert found["model"].startswith(str(site))
    assert found["config"] == "tiny-chain"
    from precision_policies import load_policy

    assert found["policy"] == load_policy("unified-fp8").fingerprint

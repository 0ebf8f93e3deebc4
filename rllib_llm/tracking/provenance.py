"""Facts about the machine and the code of a run, as MLflow tags."""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

_PACKAGES = ("rllib-llm", "torch", "transformers", "ray", "vllm", "triton", "numpy", "mlflow", "omegaconf")


def provenance_tags() -> dict[str, str]:
    """Versions, hardware, command and git commits; a fact that cannot be had is left out, never guessed."""
    tags = {
        # MLflow's pages show what follows the last "/" of the name: a whole command would lose its beginning
        "mlflow.source.name": Path(sys.argv[0]).name,
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])[:5000],
        "mlflow.source.type": "LOCAL",
        "version.python": platform.python_version(),
        "hardware.machine": f"{platform.system()} {platform.machine()}",
        "hardware.host": platform.node(),
        "hardware.cpus": str(os.cpu_count()),
        **_versions(),
        **_gpus(),
        **_memory(),
    }
    with contextlib.suppress(KeyError, OSError):
        tags["mlflow.user"] = getpass.getuser()
    for prefix, folder in (("git.rllib_llm", Path(__file__).parent), ("git.working_directory", Path.cwd())):
        tags.update(git_tags(prefix, folder))
    if "git.rllib_llm.commit" in tags:
        tags["mlflow.source.git.commit"] = tags["git.rllib_llm.commit"]
    return tags


def git_tags(prefix: str, folder: Path) -> dict[str, str]:
    """``{prefix}.commit`` and ``{prefix}.dirty`` of the checkout that holds ``folder``; empty outside a checkout."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {
        f"{prefix}.commit": commit,
        f"{prefix}.dirty": "unknown" if status is None else str(bool(status)).lower(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[f"version.{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _gpus() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"hardware.gpus": "0"}
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "hardware.gpus": str(len(names)),
        "hardware.gpu_names": ", ".join(names),
        "version.cuda": str(torch.version.cuda),
    }


def _memory() -> dict[str, str]:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return {}
    return {"hardware.memory_gib": f"{pages * size / 2**30:.1f}"}

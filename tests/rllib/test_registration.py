"""`import rllib_llm` is cheap and makes the trainable's name known."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEADER = "import sys, rllib_llm\n"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_brings_neither_torch_nor_ray() -> None:
    """Console scripts import this package for --help; torch and RLlib would cost seven seconds."""
    assert (
        run(HEADER + "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])").strip()
        == "[]"
    )


@pytest.mark.slow
def test_name_is_known_when_rllib_is_imported_later() -> None:
    """After `import rllib_llm`, Tune finds "GRPO-LLM" whichever of the two is imported first."""
    later = (
        HEADER
        + "from ray.rllib.algorithms.registry import ALGORITHMS\nprint(ALGORITHMS['GRPO-LLM']()[0].__name__)"
    )
    assert run(later).strip().endswith("GRPO")
    earlier = (
        "from ray.rllib.algorithms.registry import ALGORITHMS\n" + HEADER + "print('GRPO-LLM' in ALGORITHMS)"
    )
    assert run(earlier).strip().endswith("True")


def test_unknown_names_are_attribute_errors() -> None:
    """A misspelt public name lists the public names."""
    import rllib_llm

    with pytest.raises(AttributeError, match="GRPOConfig"):
        _ = rllib_llm.GRPOConfg  # type: ignore[attr-defined]

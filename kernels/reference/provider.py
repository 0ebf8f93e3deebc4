"""Offers the definitions to the dispatch: the CPU's implementations, and any device's on request."""

from __future__ import annotations

import torch

from precision_kernels import reference
from precision_kernels.dispatch import OPERATORS, Implementation


def implementations() -> dict[str, Implementation]:
    """Every operator by its definition."""
    version = f"torch-{torch.__version__}"
    return {
        name: Implementation(f"reference.{name}", version, getattr(reference, name)) for name in OPERATORS
    }

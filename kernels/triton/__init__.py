"""Triton kernels: the operators on Hopper, and under Triton's interpreter on a CPU, bit-equal to the reference.

Importing this package imports its modules, each of which registers what it implements
(`precision_kernels.declaration.implements`). It needs ``triton``; an ImportError says so.
"""

from __future__ import annotations

import importlib
import pkgutil

_ON_DEMAND = "hopper_attention"
"""Written in Gluon: `attention` imports it where Triton is of a version that it was tested with."""

for _module in pkgutil.iter_modules(__path__):
    if _module.name != _ON_DEMAND:
        importlib.import_module(f"{__name__}.{_module.name}")

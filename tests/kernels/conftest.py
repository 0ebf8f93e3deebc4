"""Triton's interpreter, in which kernels run where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _scalars_end_loops() -> Iterator[None]:
    """Triton 3.6 takes a loop's end by int() of an array of one element, which numpy 2.4 refuses."""
    with pytest.MonkeyPatch.context() as patches:
        if not torch.cuda.is_available():
            from triton.runtime import interpreter

            patch_tensor = interpreter._patch_lang_tensor

            def patched(tensor, scope) -> None:
                patch_tensor(tensor, scope)
                scope.set_attr(tensor, "__index__", lambda scalar: scalar.handle.data.item())

            patches.setattr(interpreter, "_patch_lang_tensor", patched)
        yield

"""The one table of environment variables that change numerics, derived from the policy.

The engine sets them before it starts a process and reads them back in that process into its attestation;
`compare` checks them there. A variable that cannot change bits does not belong here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from .errors import PolicyError, Violation, closest

if TYPE_CHECKING:
    from .policy import PrecisionPolicy

UNSET = "<unset>"
"""What an attestation says for a variable of the table that is not set in its process."""

Engine = Literal["torch", "vllm"]
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Variable:
    """One environment variable: where it matters, what the policy makes of it, why, and what unset means.

    unset: the value that has the same effect as the variable being unset; None if there is none that can be
    relied on in every supported version, so that the variable has to be set.
    switches: (name, value) of settings inside a process that together have the effect of the variable's value where
    that is unset; a process states them in its attestation, beside the variables.
    """

    name: str
    engines: tuple[str, ...]
    devices: tuple[str, ...]
    value: Callable[[PrecisionPolicy], str]
    why: str
    unset: str | None = None
    switches: tuple[tuple[str, str], ...] = ()


def _always(text: str) -> Callable[[PrecisionPolicy], str]:
    return lambda _policy: text


_BOTH = ("torch", "vllm")
_NO_TF32 = (
    ("torch.backends.cuda.matmul.fp32_precision", "ieee"),
    ("torch.backends.cudnn.fp32_precision", "ieee"),
)
TABLE: tuple[Variable, ...] = (
    Variable(
        "NVIDIA_TF32_OVERRIDE",
        _BOTH,
        ("cuda",),
        _always("0"),
        "1 makes every fp32 cuBLAS GEMM a TF32 one",
        switches=_NO_TF32,
    ),
    Variable(
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        _BOTH,
        ("cuda",),
        _always("0"),
        "1 allows TF32 whatever the program says",
        "0",
        switches=_NO_TF32,
    ),
    Variable(
        "TRITON_F32_DEFAULT",
        _BOTH,
        ("cuda",),
        _always("ieee"),
        "default precision of tl.dot on fp32 operands",
    ),
    Variable(
        "CUBLAS_WORKSPACE_CONFIG",
        _BOTH,
        ("cuda",),
        _always(":4096:8"),
        "cuBLAS picks algorithms by workspace, and is deterministic only with a fixed one",
    ),
    Variable(
        "ONEDNN_DEFAULT_FPMATH_MODE",
        _BOTH,
        ("cpu",),
        _always("STRICT"),
        "other modes compute fp32 GEMMs in bf16 or TF32",
        "STRICT",
    ),
    Variable(
        "VLLM_USE_DEEP_GEMM",
        ("vllm",),
        ("cuda",),
        lambda p: str(int(p.linear.rollout_forward == "fp8")),
        "otherwise vLLM may choose a different block-FP8 kernel for each layer",
    ),
    Variable(
        "VLLM_USE_DEEP_GEMM_E8M0",
        ("vllm",),
        ("cuda",),
        lambda p: str(int(p.scale_format == "ue8m0")),
        "default 1 quantises weights again to power-of-two scales when they are loaded (vllm#58157)",
    ),
    Variable(
        "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER",
        ("vllm",),
        ("cuda",),
        _always("0"),
        "default 1 changes kernels below 32 rows, so bits depend on the batch (vllm#37718)",
    ),
    Variable(
        "VLLM_BATCH_INVARIANT",
        ("vllm",),
        ("cpu", "cuda"),
        _always("0"),
        "1 replaces aten operators by its own, which the learner does not have; crashes on CPU",
        "0",
    ),
    Variable(
        "VLLM_FLOAT32_MATMUL_PRECISION",
        ("vllm",),
        ("cpu", "cuda"),
        _always("highest"),
        "others compute fp32 in TF32",
    ),
    Variable(
        "VLLM_USE_FLASHINFER_SAMPLER",
        ("vllm",),
        ("cuda",),
        _always("0"),
        "its top-k/top-p differs from the renormalisation of the learner",
    ),
    Variable(
        "VLLM_CPU_ATTN_SPLIT_KV", ("vllm",), ("cpu",), _always("0"), "1 splits keys by batch and threads"
    ),
)


def environment(policy: PrecisionPolicy, engine: str = "vllm", device: str = "cuda") -> dict[str, str]:
    """name -> value for a process of `engine` on `device`, sorted by name."""
    found = []
    for key, value, options in (("engine", engine, get_args(Engine)), ("device", device, get_args(Device))):
        if value not in options:
            violation = Violation(
                key, value, f"not known{closest(value, options)}", f"use {' | '.join(options)}"
            )
            found.append(violation)
    if found:
        raise PolicyError("environment of a policy", found)
    rows = sorted(TABLE, key=lambda v: v.name)
    return {v.name: v.value(policy) for v in rows if engine in v.engines and device in v.devices}


def expected(policy: PrecisionPolicy) -> dict[str, str]:
    """Every variable of the table with the value the policy wants, whatever engine and device."""
    return {v.name: v.value(policy) for v in TABLE}


def effective(name: str, value: str) -> str:
    """`value` as read back, with an unset variable replaced by what being unset means, where that is sure."""
    known = next((v.unset for v in TABLE if v.name == name), None)
    return known if value == UNSET and known is not None else value


def switched(name: str, stated: Mapping[str, str]) -> bool:
    """Whether a process that states these values has the effect of a variable by its switches instead."""
    switches = next((v.switches for v in TABLE if v.name == name), ())
    return bool(switches) and all(stated.get(switch) == value for switch, value in switches)

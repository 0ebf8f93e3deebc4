"""Attention's backward on a Hopper GPU: against fp64, against PyTorch's kernel, bits that repeat and do not depend on
what is packed."""

from __future__ import annotations

import itertools

import pytest
import torch

from precision_kernels import dispatch
from precision_kernels.reference import AttentionLayout
from precision_kernels.triton import attention
from tests.edge_cases import assert_same_bits, generator, normal

pytestmark = pytest.mark.gpu
CUDA = "cuda"
EDGES = [1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257, 700]
"""Lengths around the kernels' steps and tiles."""


def packed(lengths: list[int]) -> AttentionLayout:
    """Whole sequences, one after the other."""
    return AttentionLayout(torch.tensor([0, *lengths], device=CUDA).cumsum(0))


def inputs(lengths, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16):
    """do, q, k, v, and o and lse of FlashAttention-3."""
    tokens = sum(lengths)
    do, q, k, v = (
        normal(tokens, h * dim, i).to(CUDA, dtype).view(tokens, h, dim)
        for i, h in enumerate((heads, heads, kv_heads, kv_heads))
    )
    o, lse = dispatch.implementation("attention", CUDA)(q, k, v, packed(lengths))
    return do, q, k, v, o, lse


def exact(do, q, k, v, lengths) -> list[torch.Tensor]:
    """dq, dk, dv of autograd in fp64."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[1] // k.shape[1]
    outputs = []
    for q_part, k_part, v_part in zip(*(x.split(lengths) for x in leaves), strict=True):
        heads = q_part.transpose(0, 1)
        keys, values = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_part, v_part))
        scores = heads @ keys.transpose(1, 2) * q.shape[2] ** -0.5
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=CUDA).triu(1)
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return list(torch.autograd.grad(torch.cat(outputs), leaves, do.double()))


def errors(actual, expected) -> list[float]:
    """Relative errors of dq, dk and dv in the 2-norm."""
    return [float((a.double() - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True)]


def backward(*arguments):
    """What is bound on the GPU."""
    return dispatch.implementation("attention_backward", CUDA)(*arguments)


@pytest.fixture(params=["Gluon", "Triton"])
def language(request, monkeypatch):
    """The launch for keys and values as it is bound, and as other versions of Triton take it."""
    if request.param == "Triton":
        monkeypatch.setattr(attention, "_hopper", lambda device: None)
    else:
        assert attention._hopper(torch.device(CUDA)), "this Triton is not among attention.GLUON"


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads"), [(64, 6, 2), (80, 4, 2), (96, 4, 2), (128, 8, 8), (128, 8, 1), (256, 4, 2)]
)
def test_gradients_against_fp64(dim, heads, kv_heads, dtype):
    """Within 5e-3 (bf16) and 1e-3 (fp16) over all edges, and no further off than PyTorch's kernel is."""
    from precision_kernels.hopper.flash_attention import torch_attention_backward

    case = inputs(EDGES, heads, kv_heads, dim, dtype)
    expected = exact(*case[:4], EDGES)
    ours = errors(backward(*case, packed(EDGES)), expected)
    theirs = errors(torch_attention_backward(*case, packed(EDGES)), expected)
    assert max(ours) < (5e-3 if dtype == torch.bfloat16 else 1e-3), ours
    assert all(a < 1.1 * b for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.usefixtures("language")
def test_uneven_batches_against_fp64():
    """Twenty batches of 1 to 40 sequences of 1 to 400 tokens: within 5e-3."""
    draw = generator(11)
    for _ in range(20):
        count = int(torch.randint(1, 41, (1,), generator=draw))
        lengths = torch.randint(1, 401, (count,), generator=draw).tolist()
        case = inputs(lengths, 4, 2)
        found = errors(backward(*case, packed(lengths)), exact(*case[:4], lengths))
        assert max(found) < 5e-3, (lengths, found)


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("dim", [64, 128])
def test_bits_repeat_and_do_not_depend_on_what_is_packed(dim):
    """Ten runs of a full batch are equal, and its sequences alone, of which one is between NaN, have the same bits."""
    lengths = [2048, 1, 517, 1200, 64, 2000, 129, 33]
    case = inputs(lengths, 32, 8, dim)
    first = backward(*case, packed(lengths))
    for _ in range(10):
        for a, b in zip(backward(*case, packed(lengths)), first, strict=True):
            assert_same_bits(a, b, "repeated")
    starts = [0, *itertools.accumulate(lengths)]
    for start, stop in itertools.pairwise(starts):
        alone = backward(*(x[start:stop] for x in case), packed([stop - start]))
        for a, b in zip(alone, first, strict=True):
            assert_same_bits(a, b[start:stop].contiguous(), f"alone {stop - start}")
    broken = [x.clone() for x in case]
    for x in broken:
        x[: starts[2]], x[starts[3] :] = torch.nan, torch.nan
    for a, b in zip(backward(*broken, packed(lengths)), first, strict=True):
        assert_same_bits(a[starts[2] : starts[3]].contiguous(), b[starts[2] : starts[3]].contiguous(), "NaN")


def test_columns_of_one_matrix_need_no_copy():
    """q, k and v as columns of their joint product give the bits of matrices of their own."""
    lengths = [300, 77]
    do, q, k, v, o, lse = inputs(lengths)
    joint = torch.cat((q, k, v), 1).split([8, 2, 2], 1)
    expected = backward(do, q, k, v, o, lse, packed(lengths))
    for a, b in zip(backward(do, *joint, o, lse, packed(lengths)), expected, strict=True):
        assert_same_bits(a, b)


def test_nothing_waits_for_the_host():
    """A backward whose layout was used before can be captured into a CUDA graph, and replays the same bits."""
    lengths = [130, 64]
    case, layout = inputs(lengths), packed(lengths)
    expected = backward(*case, layout)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = backward(*case, layout)
    graph.replay()
    for a, b in zip(results, expected, strict=True):
        assert_same_bits(a, b)

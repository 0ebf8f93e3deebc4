"""The checksum of tensors: one definition, equal bits everywhere, and every small damage is seen."""

from __future__ import annotations

import importlib

import pytest
import torch

from precision_kernels.autograd.operators import tensor_digest
from precision_kernels.reference import digest
from tests.edge_cases import generator, layouts, normal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernel = importlib.import_module("precision_kernels.triton.digest").tensor_digest
SIZES = (0, 1, 7, 8, 9, 15, 16, 255, 2048 * 8, 2048 * 8 + 1, 2048 * 64 + 5, 300_001)


def random_bytes(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator(seed))


def by_python(data: bytes) -> list[int]:
    """The formula of the docstring in Python's own whole numbers."""
    modulus, f_sum, h_sum = 1 << 64, 0, 0
    data += bytes(-len(data) % 8)
    for i in range(len(data) // 8):
        u = (int.from_bytes(data[8 * i : 8 * i + 8], "little") + (i + 1) * digest.A) * digest.B % modulus
        g = (u ^ u >> 32) * digest.C % modulus
        f = g ^ g >> 32
        v = f * digest.D % modulus
        f_sum, h_sum = f_sum + f, h_sum + (v ^ v >> 29)
    return [digest.signed(f_sum), digest.signed(h_sum)]


@pytest.mark.parametrize("size", SIZES)
def test_definition_and_kernel_follow_the_formula(size: int) -> None:
    """torch on the CPU and the Triton kernel give the lanes that Python's big integers give, for any size."""
    data = random_bytes(size)
    expected = by_python(bytes(data.tolist()))
    assert digest.tensor_digest([data]).tolist() == [expected]
    assert kernel([data.to(DEVICE)]).tolist() == [expected]


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int64], ids=str
)
def test_a_tensor_has_the_lanes_of_its_bytes(dtype: torch.dtype) -> None:
    """Every dtype, with 0, 1 and 3 dimensions; several tensors in one call; NaN and -0.0 are bytes like others."""
    tensors = [normal(5, 7).to(dtype), normal(1, 1).to(dtype)[0, 0], normal(6, 10).to(dtype).view(3, 4, 5)]
    if dtype.is_floating_point:
        tensors.append(torch.tensor([float("nan"), -0.0, 0.0]).to(dtype))
    expected = [by_python(bytes(t.reshape(-1).view(torch.uint8).tolist())) for t in tensors]
    assert digest.tensor_digest(tensors).tolist() == expected
    assert kernel([t.to(DEVICE) for t in tensors]).tolist() == expected


def test_strides_and_odd_addresses_change_nothing() -> None:
    """A view is what it shows: transposed, sliced, expanded, or beginning at an address that is no multiple of 8."""
    x = normal(33, 65)
    expected = digest.tensor_digest([x]).tolist()
    for name, view in layouts(x):
        assert digest.tensor_digest([view]).tolist() == expected, name
        assert kernel([view.to(DEVICE)]).tolist() == expected, name
    data = random_bytes(100)
    shifted = torch.cat([data[:3], data]).to(DEVICE)[3:]
    assert (
        kernel([shifted]).tolist()
        == digest.tensor_digest([shifted]).tolist()
        == [by_python(bytes(data.tolist()))]
    )


def test_every_single_bit_is_seen() -> None:
    """Each of 1 056 bits of a tensor, turned over, changes both lanes, and no two turns give the same lanes."""
    data = random_bytes(132)
    turned = []
    for bit in range(8 * len(data)):
        copy = data.clone()
        copy[bit // 8] ^= 1 << (bit % 8)
        turned.append(copy)
    lanes = torch.stack([digest.tensor_digest([data])[0], *digest.tensor_digest(turned)])
    for lane in lanes.t():
        assert len(lane.unique()) == len(turned) + 1


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_every_swap_is_seen(size: int) -> None:
    """Any two elements that change places (1 to 16 bytes wide) change the lanes, also when they differ in one bit."""
    elements = random_bytes(40 * size).view(40, size)
    elements[20:] = elements[:20]
    elements[20:, -1] ^= 128  # for every element one that differs in its highest bit
    expected = digest.tensor_digest([elements]).tolist()[0]
    for i in range(40):
        for j in range(i):
            if torch.equal(elements[i], elements[j]):
                continue
            swapped = elements.clone()
            swapped[[i, j]] = elements[[j, i]]
            assert digest.tensor_digest([swapped]).tolist()[0] != expected, (i, j)


def test_zeros_of_different_length_and_shifted_data_differ() -> None:
    """Zero words count by their place; data that moved by whole words is other data."""
    lanes = digest.tensor_digest([torch.zeros(8 * n, dtype=torch.uint8) for n in range(50)])
    assert len(lanes.unique(dim=0)) == 50
    data = random_bytes(64)
    moved = torch.cat([torch.zeros(8, dtype=torch.uint8), data])
    assert digest.tensor_digest([moved]).tolist() != digest.tensor_digest([data]).tolist()


def test_parts_add_up_to_the_whole() -> None:
    """A tensor cut at multiples of 8 bytes, in any order, has the lanes of the whole; other cuts are refused."""
    data = random_bytes(5_003)
    starts = [0, 8, 4_096, 4_104]
    parts = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)], strict=True)]
    for function, device in ((digest.tensor_digest, "cpu"), (kernel, DEVICE)):
        lanes = function([p.to(device) for p in reversed(parts)], list(reversed(starts)))
        assert lanes.sum(0).tolist() == digest.tensor_digest([data])[0].tolist()
    for wrong in ([4], [-8], [0, 8]):
        with pytest.raises(ValueError, match="multiples of 8"):
            tensor_digest([data], wrong)


def test_no_tensors_have_no_lanes() -> None:
    """The empty list is not an error."""
    assert tensor_digest([]).shape == kernel([]).shape == (0, 2)


@pytest.mark.gpu
def test_a_tensor_beyond_32_bits_has_equal_lanes_in_parts_on_a_gpu() -> None:
    """4.3 GB in one tensor: the kernel's sums are those of its parts, and those of the definition at the far end."""
    size = (1 << 32) + 24
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
    cut = (1 << 32) - 8 * 1000
    whole, parts = kernel([data]), kernel([data[:cut], data[cut:]], [0, cut])
    assert whole[0].tolist() == parts.sum(0).tolist()
    assert parts[1].tolist() == digest.tensor_digest([data[cut:].cpu()], [cut])[0].tolist()

import pickle

import numpy as np
import pytest
import torch

from rllib_llm.sync.packed import PackedTensor, WeightSyncError, WeightUpdate
from rllib_llm.sync.verify import verify_update
from rllib_llm.weights.format import DTYPES, TensorSpec, hash_tensors

EDGE_SHAPES = [(1,), (1, 1), (128, 128), (192, 576), (3, 0), (130, 1)]


def make_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_update(version: int = 3) -> WeightUpdate:
    """Two quantised linears, a norm and a bias, in checkpoint names."""
    tensors = {
        "a.weight": make_tensor(torch.float8_e4m3fn, (192, 130), 1),
        "a.weight_scale_inv": make_tensor(torch.float32, (2, 2), 2),
        "a.bias": make_tensor(torch.bfloat16, (192,), 3),
        "b.weight": make_tensor(torch.float8_e4m3fn, (128, 128), 4),
        "b.weight_scale_inv": make_tensor(torch.float32, (1, 1), 5),
        "norm.weight": make_tensor(torch.bfloat16, (130,), 6),
    }
    packed = {name: PackedTensor.pack(t) for name, t in tensors.items()}
    return WeightUpdate(version, "f" * 64, "p" * 64, packed, {n: t.hash() for n, t in packed.items()})


def expected_of(update: WeightUpdate) -> dict[str, TensorSpec]:
    return {name: TensorSpec(t.dtype, t.shape) for name, t in update.tensors.items()}


def refused(
    update: WeightUpdate, expected: dict[str, TensorSpec], policy: str = "f" * 64, plan: str = "p" * 64
) -> str:
    with pytest.raises(WeightSyncError) as caught:
        verify_update(update, expected, policy, plan)
    return str(caught.value)


def replace(update: WeightUpdate, **changes) -> WeightUpdate:
    fields = {
        k: getattr(update, k) for k in ("version", "policy_fingerprint", "plan_hash", "tensors", "hashes")
    }
    return WeightUpdate(**(fields | changes))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", EDGE_SHAPES, ids=str)
def test_pack_round_trip_keeps_every_byte(dtype, shape):
    """pack → pickle → unpack gives the same bytes for every dtype that is sent, float8 (which torch cannot
    pickle) included."""
    tensor = make_tensor(dtype, shape)
    packed = pickle.loads(pickle.dumps(PackedTensor.pack(tensor)))
    back = packed.unpack()
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.view(torch.uint8).reshape(-1), tensor.view(torch.uint8).reshape(-1))
    assert packed.problems() == []


def test_pack_owns_its_bytes():
    """Changing the tensor after packing does not change what was packed, nor does changing an unpacked
    tensor."""
    tensor = make_tensor(torch.float32, (4, 4))
    packed = PackedTensor.pack(tensor)
    before = packed.hash()
    tensor.zero_()
    packed.unpack().zero_()
    assert packed.hash() == before


def test_pack_of_transposed_view_is_row_major():
    """A non-contiguous tensor is packed in the row-major order of its shape."""
    tensor = make_tensor(torch.bfloat16, (5, 3)).t()
    assert torch.equal(PackedTensor.pack(tensor).unpack(), tensor)


def test_hash_depends_on_dtype_and_shape_not_only_bytes():
    """The same bytes under another shape or dtype have another hash."""
    base = PackedTensor.pack(torch.arange(8, dtype=torch.float32))
    assert PackedTensor(base.data, "float32", (2, 4)).hash() != base.hash()
    assert PackedTensor(base.data, "bfloat16", (16,)).hash() != base.hash()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_hash_of_a_tensor_is_that_of_its_packed_bytes(dtype):
    """Sender (the tensor, on its device) and receiver (the bytes) compute one hash, for views and empty tensors too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {str(shape): make_tensor(dtype, shape) for shape in EDGE_SHAPES}
    tensors["view"] = make_tensor(dtype, (5, 7)).t()[1:, 2:]
    expected = {name: PackedTensor.pack(t).hash() for name, t in tensors.items()}
    assert hash_tensors({name: t.to(device) for name, t in tensors.items()}) == expected
    assert len(set(expected.values())) == len(expected)


def test_unsent_dtype_is_refused_by_name():
    """A dtype outside the table is an error at packing, not a silent conversion."""
    with pytest.raises(TypeError, match="int64"):
        PackedTensor.pack(torch.arange(3))


def test_verify_accepts_what_was_sent():
    """An untouched update passes."""
    update = make_update()
    verify_update(update, expected_of(update), "f" * 64, "p" * 64)


def test_verify_lists_all_violations_at_once():
    """One message names: other policy, other plan, missing half of a pair, unknown name, wrong dtype,
    shape, bytes, no hash."""
    good = make_update()
    tensors, hashes = dict(good.tensors), dict(good.hashes)
    del tensors["a.weight_scale_inv"]
    tensors["stranger"] = tensors["norm.weight"]
    tensors["a.bias"] = PackedTensor.pack(make_tensor(torch.float32, (192,)))
    tensors["norm.weight"] = PackedTensor.pack(make_tensor(torch.bfloat16, (129,)))
    flipped = tensors["b.weight"].data.copy()
    flipped[77] ^= 1
    tensors["b.weight"] = PackedTensor(flipped, "float8_e4m3fn", (128, 128))
    tensors["b.weight_scale_inv"] = PackedTensor(np.zeros(3, np.uint8), "float32", (1, 1))
    del hashes["a.weight"]
    message = refused(replace(good, tensors=tensors, hashes=hashes), expected_of(good), "0" * 64, "1" * 64)
    for part in (
        "version 3",
        "policy fingerprint ffffffff",
        "plan hash pppppppp",
        "a.weight_scale_inv: missing (while a.weight came)",
        "stranger: unknown",
        "a.weight_scale_inv: hash without a tensor",
        "a.bias: dtype float32, the plan says bfloat16",
        "norm.weight: shape [129], the plan says [130]",
        "b.weight: bytes hash to",
        "b.weight_scale_inv: 3 bytes",
        "a.weight: no hash",
    ):
        assert part in message, part


def test_error_survives_pickling():
    """The refusal crosses process boundaries with its list and version."""
    error = pickle.loads(pickle.dumps(WeightSyncError(["x: missing"], 7)))
    assert error.violations == ("x: missing",)
    assert error.version == 7


@pytest.mark.parametrize("max_bytes", [1, 200, 20_000, 10**9])
def test_split_and_assemble_is_the_identity(max_bytes):
    """Chunks of any size, in any order, assemble to the update; no chunk of several tensors exceeds the
    bound."""
    update = make_update()
    chunks = list(update.split(max_bytes))
    for chunk in chunks:
        assert len(chunk.tensors) == 1 or sum(t.data.nbytes for t in chunk.tensors.values()) <= max_bytes
    back = WeightUpdate.assemble(reversed(chunks))
    assert dict(back.hashes) == dict(update.hashes)
    assert {n: t.hash() for n, t in back.tensors.items()} == dict(update.hashes)


def test_assemble_lists_missing_repeated_and_mixed_chunks():
    """A chunk that is missing, one that came twice, one of another version and a tensor in two chunks are
    all named."""
    chunks = list(make_update().split(200))
    other = next(iter(make_update(version=4).split(200)))
    moved = type(chunks[2])(3, "f" * 64, "p" * 64, 2, len(chunks), chunks[1].tensors, chunks[1].hashes)
    with pytest.raises(WeightSyncError) as caught:
        WeightUpdate.assemble([chunks[1], moved, moved, other, *chunks[4:]])
    message = str(caught.value)
    assert "chunk 3 of" in message
    assert "is missing" in message
    assert "chunk 2 arrived 2 times" in message
    assert "(4, " in message
    assert "is in chunk 1 and in chunk 2" in message


def test_assemble_of_nothing_is_refused():
    """No chunks are not an empty update."""
    with pytest.raises(WeightSyncError, match="no chunk"):
        WeightUpdate.assemble([])

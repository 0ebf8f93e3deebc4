"""Weights that are no weights are refused by name, and a directory holds a whole checkpoint at every moment."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rllib_llm.models import checkpoint as checkpoint_module
from rllib_llm.models import load_pretrained, save_pretrained
from rllib_llm.models.checkpoint import check_weights
from rllib_llm.models.paths import ModelPathError
from rllib_llm.models.safetensor_files import INDEX_FILE, SINGLE_FILE, ModelFilesError
from tests.models.cases import make_model

NAME = "model.layers.1.mlp.up_proj.weight"
LOADERS: dict[str, Callable[[Path, Any], Any]] = {
    "check_weights": check_weights,
    "train": load_pretrained,
    "rollout": lambda directory, policy: load_pretrained(directory, policy, "rollout"),
}
CODES = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A saved tied qwen3 model."""
    return save_pretrained(make_model("qwen3", "bf16"), tmp_path / "model")


def change(directory: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, directory / SINGLE_FILE)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("dtype", CODES, ids=str)
@pytest.mark.parametrize("name", [NAME, "model.norm.weight"])
def test_codes_without_scales_are_refused_by_name(directory: Path, name: str, dtype: Any, load: str) -> None:
    """FP8 and whole numbers mean nothing alone; the refusal names tensor and dtype."""
    change(directory, lambda t: t.update({name: t[name].to(dtype)}))
    with pytest.raises(ModelFilesError, match=rf"{name}: dtype"):
        LOADERS[load](directory, "unified-fp8")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_other_floating_point_dtypes_load_with_their_values(directory: Path, dtype: torch.dtype) -> None:
    """A checkpoint in float16, float32 or float64 is rounded once, to the master dtype."""
    expected = load_file(directory / SINGLE_FILE)
    change(directory, lambda t: t.update({n: x.to(dtype) for n, x in t.items()}))
    model = load_pretrained(directory, "bf16")
    assert all(torch.equal(p, expected[n].to(dtype).float()) for n, p in model.named_parameters())


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("policy", ["unified-fp8", "bf16"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(
    directory: Path, value: float, policy: str, load: str
) -> None:
    """One such value trains on silently under FP8, which saturates it; all tensors that hold some are listed."""

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in (NAME, "model.norm.weight"):
            tensors[name].view(-1)[3] = value

    change(directory, edit)
    with pytest.raises(ModelFilesError, match=rf"{NAME}: 1 of") as caught:
        LOADERS[load](directory, policy)
    assert "model.norm.weight: 1 of 128" in str(caught.value)


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize(("policy", "value"), [("fp16", 65520.0), ("fp16", -1e30), ("bf16", 3.4028e38)])
def test_values_that_overflow_the_policys_dtype_are_refused(
    directory: Path, policy: str, value: float, load: str
) -> None:
    """float32 weights beyond float16, or beyond bfloat16, would be infinite in every GEMM."""
    change(directory, lambda t: t.update({NAME: t[NAME].float().index_fill_(0, torch.tensor([5]), value)}))
    with pytest.raises(ModelFilesError, match=rf"{NAME}: its largest value .* overflows"):
        LOADERS[load](directory, policy)


@pytest.mark.parametrize(("value", "dtypes"), [
    (65504.0, {"float16", "bfloat16", "float32"}), (65519.0, {"float16", "bfloat16", "float32"}),
    (65520.0, {"bfloat16", "float32"}), (-1e5, {"bfloat16", "float32"}), (3.4e38, {"float32"}),
    (float("nan"), set()), (float("inf"), set()),
])  # fmt: skip
def test_saving_refuses_what_the_dtype_cannot_hold(tmp_path: Path, value: float, dtypes: set[str]) -> None:
    """The refusal names the tensor, and nothing of the old checkpoint is touched."""
    model = make_model("qwen3", "bf16")
    save_pretrained(model, tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    with torch.no_grad():
        model.get_parameter(NAME).view(-1)[9] = value
    for dtype in ("float16", "bfloat16", "float32"):
        if dtype in dtypes:
            save_pretrained(model, tmp_path / dtype, dtype=dtype)
            assert all(x.isfinite().all() for x in load_file(tmp_path / dtype / SINGLE_FILE).values())
        else:
            with pytest.raises(ModelFilesError, match=NAME):
                save_pretrained(model, tmp_path, dtype=dtype)
    assert {n: (tmp_path / n).read_bytes() for n in before} == before


INDEXES: dict[str, Any] = {
    "no JSON": "nonsense", "empty": "", "a list": "[]", "no map": "{}", "map is a list": '{"weight_map": []}',
    "file is a number": '{"weight_map": {"a": 3}}', "file is null": '{"weight_map": {"a": null}}',
    "cut off": '{"weight_map": {"a": "model-0',
}  # fmt: skip


@pytest.mark.parametrize("text", INDEXES.values(), ids=INDEXES)
def test_a_damaged_index_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    """As ModelFilesError and as ModelPathError, from every loader."""
    save_pretrained(make_model("qwen3", "bf16"), tmp_path, max_shard_bytes=50_000)
    (tmp_path / INDEX_FILE).write_text(text)
    for load in LOADERS.values():
        with pytest.raises(ModelFilesError, match=INDEX_FILE) as caught:
            load(tmp_path, "bf16")
        assert isinstance(caught.value, ModelPathError)


def test_what_the_index_does_not_name_is_none_of_the_models(tmp_path: Path) -> None:
    """Stale tensors of any shape and dtype in other shards: names, shapes and values come from
    where the index says."""
    model = make_model("qwen3", "bf16")
    save_pretrained(model, tmp_path, max_shard_bytes=50_000)
    weight_map = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    for shard in set(weight_map.values()):
        tensors = load_file(tmp_path / shard)
        for name in set(weight_map) - set(tensors):
            tensors[name] = torch.zeros(3, 3, dtype=torch.int8)
        tensors["model.layers.9.mlp.up_proj.weight"] = torch.full((2,), torch.nan)
        save_file(tensors, tmp_path / shard)
    check_weights(tmp_path, "bf16")
    loaded = load_pretrained(tmp_path, "bf16")
    expected = dict(model.named_parameters())
    assert all(torch.equal(p, expected[n].bfloat16().float()) for n, p in loaded.named_parameters())


# ---- written again ---------------------------------------------------------------------------------------------------

SHAPES = {"one file": 1 << 30, "shards": 50_000, "more shards": 20_000}


class _Killed(BaseException):
    """The process ends here."""


def killed_at(monkeypatch: pytest.MonkeyPatch, steps: Iterator[int]) -> None:
    """Before the n-th change of a directory entry (rename, removal, exchange) the process ends."""

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def change(*arguments: Any, **keywords: Any) -> Any:
            if next(steps) == 0:
                raise _Killed
            return call(*arguments, **keywords)

        return change

    for owner, name in (
        (Path, "replace"),
        (Path, "rename"),
        (Path, "unlink"),
        (checkpoint_module, "exchange"),
    ):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def values_of(directory: Path) -> dict[str, torch.Tensor]:
    """What we and transformers read from a directory, which is the same."""
    ours = {n: p.detach() for n, p in load_pretrained(directory, "bf16").named_parameters()}
    theirs = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
    assert all(torch.equal(p, theirs[n].float()) for n, p in ours.items())
    return ours


@pytest.mark.parametrize("second", SHAPES)
@pytest.mark.parametrize("first", SHAPES)
def test_a_directory_written_again_holds_one_checkpoint(tmp_path: Path, first: str, second: str) -> None:
    """Every file of the old one is gone, left-over shards too; files of the user's stay."""
    (tmp_path / "notes.txt").write_text("mine")
    for seed, kind in ((1, first), (2, second), (3, second)):
        model = make_model("qwen3", "bf16", seed=seed)
        (tmp_path / "model-00007-of-00009.safetensors").write_bytes(b"left over")
        save_pretrained(model, tmp_path, max_shard_bytes=SHAPES[kind])
        there = {f.name for f in tmp_path.iterdir()} - {"notes.txt", "config.json"}
        if (tmp_path / INDEX_FILE).is_file():
            named = set(json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"].values())
            assert there == named | {INDEX_FILE}
        else:
            assert there == {SINGLE_FILE}
        found = values_of(tmp_path)
        assert torch.equal(found[NAME], model.get_parameter(NAME).bfloat16().float())


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("second", ["one file", "shards"])
@pytest.mark.parametrize("first", ["one file", "shards"])
def test_a_directory_is_never_without_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, kind: str
) -> None:
    """Killed before any rename, removal or exchange, with the same architecture or another: what is read is the old
    checkpoint or the new one, and the next save mends the directory."""
    old, new = make_model("qwen3", "bf16", seed=1), make_model(kind, "bf16", seed=2)
    for step in range(40):
        directory = tmp_path / str(step)
        save_pretrained(old, directory, max_shard_bytes=SHAPES[first])
        with monkeypatch.context() as patch:
            killed_at(patch, iter(range(step, -100, -1)))
            try:
                save_pretrained(new, directory, max_shard_bytes=SHAPES[second])
                finished = True
            except _Killed:
                finished = False
        found = {n: p.detach() for n, p in load_pretrained(directory, "bf16").named_parameters()}
        which = [
            all(
                n in found and torch.equal(found[n], p.bfloat16().float())
                for n, p in model.named_parameters()
            )
            for model in (old, new)
        ]
        assert which in ([True, False], [False, True]), step
        if finished:
            assert which == [False, True]
            break
        save_pretrained(new, directory, max_shard_bytes=SHAPES[second])
        assert not list(directory.glob("*.part"))
    assert finished
    assert step >= 2 if kind == "qwen3" else step >= 1


def test_another_model_takes_a_directorys_place_with_its_own_files_alone(tmp_path: Path) -> None:
    """Tokenizer and weights of the old model go, the user's files stay."""
    save_pretrained(make_model("qwen3", "bf16"), tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    save_pretrained(make_model("llama", "bf16"), tmp_path / "model")
    assert {f.name for f in (tmp_path / "model").iterdir()} == {"config.json", SINGLE_FILE, "notes.txt"}
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
    load_pretrained(tmp_path / "model", "bf16")


def test_where_directories_cannot_change_places_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written, the old model is still there."""

    def cannot(*_: Any) -> None:
        raise OSError(22, os.strerror(22))

    monkeypatch.setattr(checkpoint_module, "exchange", cannot)
    save_pretrained(make_model("qwen3", "bf16"), tmp_path / "model")
    with pytest.raises(ModelFilesError, match="save into a new directory"):
        save_pretrained(make_model("llama", "bf16"), tmp_path / "model")
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
    load_pretrained(tmp_path / "model", "bf16")

"""Checkpoints of strangers: nothing that lies in one is executed, and what was changed or added is refused."""

from __future__ import annotations

import hashlib
import json
import pathlib
import pickle
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow.fs
import pytest
import torch
from ray import tune

from rllib_llm import GRPO, CausalLMModule
from rllib_llm.cli.evaluate import _restore
from rllib_llm.on_disk.checkpoint import (
    CLASS_FILE,
    LEARNER_FOLDER,
    MANIFEST_FILE,
    MARKER_FILE,
    MODULE_FOLDER,
    CheckpointError,
    verify_files,
    write_manifest,
)
from rllib_llm.on_disk.directories import find_checkpoint
from rllib_llm.on_disk.state_file import StateFileError, read_state, write_state
from rllib_llm.registry.masters import load_masters, read_checkpoint

Make = Callable[..., Any]
LOCAL = pyarrow.fs.LocalFileSystem()


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, trace: pathlib.Path):
        self.trace = trace

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.trace,)


@pytest.fixture
def trace(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file that a payload makes; the payload works."""
    file = tmp_path / "executed"
    pickle.loads(pickle.dumps(Payload(file)))
    assert file.exists()
    file.unlink()
    return file


def forge_manifest(path: pathlib.Path) -> None:
    """A manifest that lists whatever lies there, as its writer would not have."""
    document = json.loads((path / MANIFEST_FILE).read_text())
    files = {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    document["files"] = {
        name: {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
        for name, whole in files.items()
        if name != MANIFEST_FILE
    }
    (path / MANIFEST_FILE).write_text(json.dumps(document))


def everything(path: pathlib.Path, algo: Any) -> list[Callable[[], Any]]:
    """What reads a checkpoint, `from_checkpoint` aside."""
    return [
        lambda: algo.restore_from_path(path),
        lambda: algo.restore(str(path)),
        lambda: algo.restore(tune.Checkpoint.from_directory(path)),
        lambda: _restore(path, 2).stop(),
        lambda: load_masters(read_checkpoint(path)),
        lambda: CausalLMModule.from_checkpoint(path / LEARNER_FOLDER / MODULE_FOLDER),
        lambda: find_checkpoint(path),
    ]


@pytest.mark.parametrize("forged", [False, True], ids=["as_written", "with_a_forged_manifest"])
def test_no_planted_payload_runs(
    build: Make, tmp_path: pathlib.Path, trace: pathlib.Path, forged: bool
) -> None:
    """A pickle in the place of each file, and beside them, is executed by nobody; by `from_checkpoint`
    neither, unless the manifest was forged too."""
    algo = build()
    path = pathlib.Path(algo.save_to_path(tmp_path / "c"))
    names = [p.relative_to(path) for p in sorted(path.rglob("*")) if p.is_file()]
    assert [str(n) for n in names if n.suffix == ".pkl"] == [MARKER_FILE, CLASS_FILE]
    added = [
        pathlib.Path(n)
        for n in ("_dict_checkpoint.pkl", "algorithm_state.msgpack", "learner_group/state.pkl")
    ]
    for name in [*names, *added]:
        before = (path / name).read_bytes() if name in names else None
        (path / name).write_bytes(pickle.dumps(Payload(trace)))
        if forged and name.name != MANIFEST_FILE:
            forge_manifest(path)
        readers = everything(path, algo)
        if not forged:
            readers.append(lambda: GRPO.from_checkpoint(path))
        refused = 0
        for read in readers:
            try:
                read()
            except (CheckpointError, StateFileError, ValueError):
                refused += 1
            assert not trace.exists(), f"{name} was executed"
        if not forged:
            assert refused >= 4, f"{name}: nobody noticed"
        if before is None:
            (path / name).unlink()
        else:
            (path / name).write_bytes(before)
        write_manifest(str(path))
    algo.restore_from_path(path)


def test_every_changed_and_added_file_is_named(build: Make, tmp_path: pathlib.Path) -> None:
    """The manifest lists every file with its sha256; a changed byte, and a file too many, are refused by name."""
    path = pathlib.Path(build().save_to_path(tmp_path / "c"))
    listed = json.loads((path / MANIFEST_FILE).read_text())["files"]
    found = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file()}
    assert listed.keys() == found.keys() - {MANIFEST_FILE}
    for name, file in listed.items():
        whole = found[name].read_bytes()
        if name == MARKER_FILE:
            assert whole == b""
            continue
        assert file == {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
        found[name].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=name):
            verify_files(str(path))
        verify_files(str(path), contents=False)
        found[name].write_bytes(whole)
    (path / "learner_group" / "more.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"learner_group/more\.json"):
        verify_files(str(path))


def test_eval_rebuilds_the_config_without_its_pickle(build: Make, tmp_path: pathlib.Path) -> None:
    """A checkpoint made in Python is evaluated by its JSON config: settings and environment are those of the run."""
    algo = build()
    algo.train()
    path = pathlib.Path(algo.save_to_path(tmp_path / "c"))
    (path / CLASS_FILE).write_bytes(b"")
    write_manifest(str(path))
    other = _restore(path, 3)
    try:
        assert other.settings == algo.settings
        assert other.config.evaluation_duration == 3
        assert other.learner_files.digest() == algo.learner_files.digest()
        assert other.evaluate()["env_runners"]["num_episodes"] == 3
    finally:
        other.stop()


def test_a_module_is_built_from_its_folder(build: Make, tmp_path: pathlib.Path) -> None:
    """`CausalLMModule.from_checkpoint` needs JSON and safetensors, and gives the same weights."""
    algo = build()
    path = pathlib.Path(algo.save_to_path(tmp_path / "c"))
    module = CausalLMModule.from_checkpoint(path / LEARNER_FOLDER / MODULE_FOLDER)
    held = algo.learner_group._learner.lm_module.get_state()
    assert all(torch.equal(value, held[name]) for name, value in module.get_state().items())


def test_a_component_is_restored_from_its_folder(build: Make, tmp_path: pathlib.Path) -> None:
    """Weights alone, or the learner with its moments; any other name is refused with those that are known."""
    algo = build()
    algo.train()
    path, saved = pathlib.Path(algo.save_to_path(tmp_path / "c")), algo.learner_files.digest()
    weights = algo.learner_group._learner.lm_module.get_state()
    for component in ("learner_group", str(LEARNER_FOLDER)):
        algo.train()
        algo.restore_from_path(path / component, component=component)
        assert algo.learner_files.digest() == saved
    algo.train()
    component = str(LEARNER_FOLDER / MODULE_FOLDER)
    algo.restore_from_path(path / component, component=component)
    held = algo.learner_group._learner.lm_module.get_state()
    assert all(torch.equal(value, held[name]) for name, value in weights.items())
    assert algo.learner_files.digest() != saved, "the moments are those of the later iteration"
    with pytest.raises(ValueError, match="learner_group/learner/rl_module/default_policy"):
        algo.restore_from_path(path, component="env_runner")


STATE = {
    "none": None, "flag": True, "big": 2**80, "minus": -0.0, "tiny": 5e-324, "third": 1 / 3, "text": "ä\u2028$",
    "nan": float("nan"), "inf": [float("inf"), -float("inf")], "tuple": (1, (2.0, "x")), "empty": {},
    "deque": deque([1, 2], maxlen=3), 7: {"$odd": 1, (1, 2): None},
    "np": [np.float32(0.1), np.int64(3), np.bool_(True)],
    "arrays": [np.arange(6).reshape(2, 3), np.zeros((0, 2), np.float16), np.float64([1, 2, 3, 4])[::2], np.array(2.5)],
    "tensors": [torch.tensor([1.5, float("nan")], dtype=dtype) for dtype in
                (torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)],
    "view": torch.arange(6).reshape(2, 3).T,
}  # fmt: skip


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
        )
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple, deque)):
        maxlen = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return maxlen and len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def test_a_state_comes_back_bit_by_bit(tmp_path: pathlib.Path) -> None:
    """Types, order of keys, infinities, NaN, dtypes, shapes and bits survive."""
    folder = pathlib.PurePosixPath(tmp_path)
    write_state(LOCAL, folder, "state", STATE)
    assert same(read_state(LOCAL, folder, "state"), STATE)


@pytest.mark.parametrize(
    "value", [object(), {1}, b"bytes", np.array(["a"]), np.array([object()]), print, complex(1, 2), GRPO]
)
def test_what_is_no_plain_value_is_refused_by_its_place(tmp_path: pathlib.Path, value: Any) -> None:
    """The error names where it is and its type; no file is written."""
    with pytest.raises(StateFileError, match=r"runner\.3\.level: a "):
        write_state(LOCAL, pathlib.PurePosixPath(tmp_path), "state", {"runner": {3: {"level": value}}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"format": "rllib_llm.state/2"}', '{"format": "rllib_llm.state/1"}', "[" * 100_000,
        *(json.dumps({"format": "rllib_llm.state/1", "tensors": 0, "state": {tag: content}}) for tag, content in
          [("$tensor", "x"), ("$class", "os.system"), ("$scalar", ["object", 1]), ("$scalar", ["nonsense", 1]),
           ("$map", [[{}, 1]]), ("$map", 3), ("$float", "1e5"), ("$deque", [[1], -1]), ("$tuple", None)]),
        json.dumps({"format": "rllib_llm.state/1", "tensors": 1, "state": {}}),
    ],
)  # fmt: skip
def test_files_that_hold_no_state_are_named(tmp_path: pathlib.Path, text: str) -> None:
    """One error class, with the file's path, whatever the file says."""
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(StateFileError, match=r"state\.(json|safetensors)|no value of a state"):
        read_state(LOCAL, pathlib.PurePosixPath(tmp_path), "state")

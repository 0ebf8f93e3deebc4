"""A checkpoint of `GRPO` and its parts: the learners' files, the environments' states, and the config as plain data."""

from __future__ import annotations

import json
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.fs
import ray
from ray import cloudpickle
from ray.rllib.core import COMPONENT_LEARNER_GROUP
from ray.tune.utils.file_transfer import sync_dir_between_nodes

from rllib_llm.algorithm.fleet import call_runners, runner_ids
from rllib_llm.on_disk.checkpoint import (
    ALGORITHM_STATE,
    CLASS_FILE,
    LEARNER_FOLDER,
    MANIFEST_FILE,
    MARKER_FILE,
    METADATA_FILE,
    MODULE_FOLDER,
    verify_files,
    write_manifest,
)
from rllib_llm.on_disk.errors import CheckpointError
from rllib_llm.on_disk.state_file import write_state

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
    from ray.rllib.core.learner.learner_group import LearnerGroup
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from rllib_llm.learner.learner import LLMTorchLearner

__all__ = [
    "BAD_STATE",
    "EnvironmentStates",
    "LearnerFiles",
    "learner_part",
    "plain_config",
    "write_checkpoint",
]

BAD_STATE = (ValueError, KeyError, TypeError, IndexError, AttributeError, AssertionError, RuntimeError)
"""What setting a state raises that is well-formed and of another model, environment or version."""


class LearnerFiles:
    """Has the learners of a group write and read their part of a checkpoint, and compares what they hold."""

    def __init__(self, group: LearnerGroup):
        self._group = group

    def digest(self) -> str:
        """Fingerprint of weights and optimizer state. Raises CheckpointError where a learner is dead or differs."""
        answers = list(self._group.foreach_learner(_digest))
        if failed := [f"learner {i}: {r.get()!r}" for i, r in enumerate(answers) if not r.ok]:
            raise CheckpointError(
                f"no checkpoint can be written, learners died: {'; '.join(failed)}. Go on from the last checkpoint."
            )
        digests = [str(r.get()) for r in answers]
        if len(set(digests)) != 1:
            raise CheckpointError(f"the learners hold different weights or optimizer states: {digests}.")
        return digests[0]

    def save(self, fs: pyarrow.fs.FileSystem, folder: pathlib.PurePosixPath) -> None:
        """The first learner writes; all hold equal states. Raises CheckpointError with its reason if it cannot."""
        own = ray.util.get_node_ip_address()
        call = partial(_save, fs=fs, folder=folder.as_posix(), driver=own)
        [elsewhere] = self._all(call, "could not be saved", [0])
        if elsewhere is not None:  # on a node that does not see our disk
            node, temporary = elsewhere
            sync_dir_between_nodes(node, temporary, own, folder.as_posix())
            self._all(partial(_remove, folder=temporary), "could not clean up", [0])

    def restore(
        self, fs: pyarrow.fs.FileSystem, folder: pathlib.PurePosixPath, component: str | None = None
    ) -> None:
        """Every learner reads; component: a part of a learner, of which `folder` then is. Raises CheckpointError."""
        own = ray.util.get_node_ip_address()
        call = partial(_restore, fs=fs, folder=folder.as_posix(), driver=own, component=component)
        self._all(call, f"could not be restored from {folder}")

    def require(self, digest: str, path: str) -> None:
        """Raises CheckpointError where a learner does not hold what was saved."""
        wrong = []
        for i, result in enumerate(self._group.foreach_learner(_digest)):
            found = result.get() if result.ok else repr(result.get())
            if found != digest:
                wrong.append(f"learner {i}: {found}")
        if wrong:
            raise CheckpointError(
                f"after restoring {path}, weights or optimizer state are not those saved ({digest}): "
                f"{'; '.join(wrong)}."
            )

    def _all(self, call: Callable[[Any], Any], failure: str, ids: list[int] | None = None) -> list[Any]:
        """Results of a call on the learners. Reasons travel as values: RLlib ends a learner whose method raises."""
        results = self._group.foreach_learner(
            partial(_guarded, call=call), remote_actor_ids=None if self._group.is_local else ids
        )
        values = [r.get() for r in results]
        failed = [f"learner {i}: {_reason(v)}" for i, v in enumerate(values) if isinstance(v, Exception)]
        if failed:
            raise CheckpointError(f"the state of a learner {failure}: {'; '.join(failed)}.")
        return values


class EnvironmentStates:
    """State of each runner's environments (each has its own curriculum) as last saved or restored."""

    def __init__(self) -> None:
        self.by_runner: dict[int, Any] = {}

    def gather(self, group: EnvRunnerGroup) -> dict[int, Any]:
        """States of every healthy runner; the last known ones of the others."""
        if runner_ids(group):
            answers = call_runners(group, _get_state).answers
            self.by_runner |= {runner: r.value for runner, r in answers.items() if r.error is None}
        return self.by_runner

    def send(self, group: EnvRunnerGroup, ids: Sequence[int] | None = None) -> None:
        """Give the given runners (None: all healthy ones) their states.

        A runner that the checkpoint did not have, of evaluation or of a larger group, gets the first one's. Raises
        CheckpointError when an environment refuses its state, as one with other tasks does.
        """
        if not self.by_runner:
            return
        first = self.by_runner[min(self.by_runner)]
        runners = runner_ids(group) if ids is None else ids
        replies = call_runners(group, {i: _SetState(self.by_runner.get(i, first)) for i in runners})
        if refused := [
            f"env runner {i}:\n{r.error}" for i, r in replies.answers.items() if r.error is not None
        ]:
            raise CheckpointError("the environment did not take its saved state:\n" + "\n".join(refused))


def write_checkpoint(
    fs: pyarrow.fs.FileSystem,
    root: pathlib.PurePosixPath,
    metadata: Mapping[str, Any],
    built_of: Mapping[str, Any],
    state: dict[str, Any],
    learners: LearnerFiles,
) -> None:
    """Write all files, the manifest last: a folder without one is not a checkpoint.

    Args:
        metadata: what `read_metadata` gives back.
        built_of: class and arguments of the algorithm; RLlib unpickles them in `from_checkpoint`, nothing else does.
        state: of the algorithm without its learners; plain values and arrays.

    Raises:
        CheckpointError: a learner did not write its files.
        StateFileError: the state is not plain.
    """
    fs.create_dir(root.as_posix(), recursive=True)
    if fs.get_file_info((root / MANIFEST_FILE).as_posix()).is_file:  # of what is overwritten now
        fs.delete_file((root / MANIFEST_FILE).as_posix())
    with fs.open_output_stream((root / METADATA_FILE).as_posix()) as file:
        file.write(json.dumps(metadata).encode())
    with fs.open_output_stream((root / CLASS_FILE).as_posix()) as file:
        file.write(cloudpickle.dumps(built_of))
    fs.open_output_stream((root / MARKER_FILE).as_posix()).close()
    write_state(fs, root, ALGORITHM_STATE, state)
    learners.save(fs, root / LEARNER_FOLDER)
    write_manifest(root.as_posix(), fs)
    verify_files(root.as_posix(), fs, contents=False)


def learner_part(folder: pathlib.PurePosixPath, component: str) -> tuple[pathlib.PurePosixPath, str | None]:
    """(folder, part of a learner or None for all of it) of a component of RLlib's that is restored by itself.

    folder: of the component; of RLlib's learner group, the folder that holds the learner's.
    Raises ValueError for what is no learner's.
    """
    learner = str(LEARNER_FOLDER)
    if component == COMPONENT_LEARNER_GROUP:
        return folder / LEARNER_FOLDER.name, None
    if component != learner and not component.startswith(f"{learner}/"):
        raise ValueError(
            f"component {component!r}: one of {COMPONENT_LEARNER_GROUP}, {learner}, {learner}/{MODULE_FOLDER}."
        )
    return folder, component.removeprefix(learner).removeprefix("/") or None


def plain_config(config: AlgorithmConfig) -> tuple[dict[str, Any], list[str]]:
    """(what of a config differs from its class's defaults and is JSON, names of what differs and is not).

    A class of environments that can be imported stands as "module:Class".
    """
    defaults = type(config)().to_dict()
    plain: dict[str, Any] = {}
    objects: list[str] = []
    for name, value in config.to_dict().items():
        default = defaults.get(name)
        if value is default:
            continue
        if name == "env" and isinstance(value, type) and "<" not in value.__qualname__:
            value = f"{value.__module__}:{value.__qualname__}"
        text = _json(value)
        if text is None:
            objects.append(name)
        elif text != _json(default):
            plain[name] = json.loads(text)
    return plain, objects


def _json(value: Any) -> str | None:
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return None


class _SetState:
    """A picklable call: hands a state to a runner."""

    def __init__(self, state: dict[str, Any]):
        self.state = state

    def __call__(self, runner: Any) -> Any:
        return runner.set_state_reply(self.state)


def _get_state(runner: Any) -> Any:
    return runner.get_state_reply()


def _digest(learner: LLMTorchLearner) -> str:
    return learner.digest()


def _guarded(learner: LLMTorchLearner, call: Callable[[Any], Any]) -> Any:
    try:
        return call(learner)
    except Exception as error:
        return error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _elsewhere(fs: pyarrow.fs.FileSystem, driver: str) -> bool:
    """Whether the driver's path does not lead to the driver's files in this process."""
    return isinstance(fs, pyarrow.fs.LocalFileSystem) and ray.util.get_node_ip_address() != driver


def _save(
    learner: LLMTorchLearner, fs: pyarrow.fs.FileSystem, folder: str, driver: str
) -> tuple[str, str] | None:
    """None once written; (node, folder on it) where the driver must fetch it."""
    if not _elsewhere(fs, driver):
        learner.save_to_path(folder, filesystem=fs)
        return None
    temporary = tempfile.mkdtemp()
    learner.save_to_path(temporary, filesystem=fs)
    return ray.util.get_node_ip_address(), temporary


def _restore(
    learner: LLMTorchLearner, fs: pyarrow.fs.FileSystem, folder: str, driver: str, component: str | None
) -> None:
    if not _elsewhere(fs, driver):
        learner.restore_from_path(folder, component=component, filesystem=fs)
        return
    with tempfile.TemporaryDirectory() as temporary:
        sync_dir_between_nodes(driver, folder, ray.util.get_node_ip_address(), temporary)
        learner.restore_from_path(temporary, component=component, filesystem=fs)


def _remove(_: LLMTorchLearner, folder: str) -> None:
    shutil.rmtree(folder)

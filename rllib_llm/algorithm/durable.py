"""Saving and restoring `GRPO`: complete checkpoints, one policy, and the right weights on every runner afterwards."""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Sequence
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm

from rllib_llm.algorithm.checkpoint import (
    CheckpointError,
    absolute,
    precision_metadata,
    read_metadata,
    refuse_other_policy,
    seal,
    verify_files,
)
from rllib_llm.algorithm.fleet import call_runners, runner_ids

__all__ = ["Durable"]

# what reading a damaged pickle or msgpack can raise (documentation of pickle, "Unpickler.load")
_UNPICKLING = (
    pickle.UnpicklingError,
    EOFError,
    AttributeError,
    ImportError,
    IndexError,
    KeyError,
    ValueError,
)
_STATE_KEY = "rllib_llm"


class Durable(Algorithm):
    """Base of `GRPO`; a file of its own because saving and restoring is a subject of its own."""

    env_state: dict[int, Any] | None = None
    """runner -> its environments' state (each has its own curriculum) as last saved or restored"""

    @classmethod
    def from_checkpoint(cls, path: Any, filesystem: Any = None, **kwargs: Any) -> Any:
        """A new algorithm from a checkpoint. Relative paths are taken from the working directory."""
        if filesystem is None and isinstance(path, (str, pathlib.Path)):
            path = absolute(path)
        return super().from_checkpoint(path, filesystem, **kwargs)

    def get_metadata(self) -> dict[str, Any]:
        answers = list(self.learner_group.foreach_learner(_digest))
        if failed := [f"learner {i}: {r.get()!r}" for i, r in enumerate(answers) if not r.ok]:
            raise CheckpointError(
                f"no checkpoint can be written, learners died: {'; '.join(failed)}. Go on from the last checkpoint."
            )
        digests = [r.get() for r in answers]
        if len(set(digests)) != 1:
            raise CheckpointError(f"the learners hold different weights or optimizer states: {digests}.")
        return super().get_metadata() | precision_metadata(
            self.settings.policy,
            model=self.settings.model.path,
            weights_version=self.weights.version,
            learner_digest=digests[0],
            training_iteration=self.iteration,
        )

    def save_to_path(
        self, path: Any = None, *, state: Any = None, filesystem: Any = None, use_msgpack: bool = False
    ) -> str:
        """Writes a checkpoint and checks that it is complete. Relative paths are taken from the working directory.

        Raises CheckpointError when a learner did not write its files.
        """
        path = path if filesystem is not None else absolute(path)
        out = super().save_to_path(path, state=state, filesystem=filesystem, use_msgpack=use_msgpack)
        seal(out, filesystem)
        verify_files(out, filesystem)
        return out

    def restore_from_path(
        self, path: Any, *args: Any, component: str | None = None, filesystem: Any = None, **kwargs: Any
    ) -> None:
        """Restores, checks that the learners hold what was saved, and pushes the weights to every runner.

        Raises PrecisionChangeError for a checkpoint of another policy (unless allowed), CheckpointError for an
        incomplete or damaged one.
        """
        path = path if filesystem is not None else absolute(path)
        same_policy, saved = True, None
        if component is None:
            verify_files(path, filesystem)
            saved = read_metadata(path, filesystem)
            allow = self.settings.precision.allow_precision_change
            same_policy = refuse_other_policy(saved, self.settings.policy, allow, path)
        try:
            super().restore_from_path(path, *args, component=component, filesystem=filesystem, **kwargs)
        except _UNPICKLING as error:
            raise CheckpointError(
                f"checkpoint {path} cannot be restored ({type(error).__name__}: {error}): its files are not those that "
                "were written, or it was written with other versions of Ray or rllib_llm. Go on from an earlier one."
            ) from error
        if saved is not None and same_policy:
            self._assert_restored(saved["learner_digest"], path)
        self._after_restore()

    def _assert_restored(self, digest: str, path: str) -> None:
        """RLlib ignores errors of remote learners while they restore."""
        wrong = []
        for i, result in enumerate(self.learner_group.foreach_learner(_digest)):
            found = result.get() if result.ok else repr(result.get())
            if found != digest:
                wrong.append(f"learner {i}: {found}")
        if wrong:
            raise CheckpointError(
                f"after restoring {path}, weights or optimizer state are not those saved ({digest}): "
                f"{'; '.join(wrong)}."
            )

    def _after_restore(self) -> None:
        self.weights.learner_changed()
        self.push_weights()
        for group in (self.env_runner_group, self.eval_env_runner_group):
            if group is not None:
                self.send_env_state(group)

    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        state = super().get_state(components, not_components=not_components, **kwargs)
        if self._check_component(_STATE_KEY, components, not_components):
            self.env_state = self._env_state()
            state[_STATE_KEY] = {
                "next_prompt": self.next_prompt,
                "consecutive_empty": self.consecutive_empty,
                "guard": self.monitor.guard.get_state(),
                "forced_correction": self.forced_correction,
                "env_state": self.env_state,
            }
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        if own := state.get(_STATE_KEY):
            self.next_prompt = own["next_prompt"]
            self.consecutive_empty = own["consecutive_empty"]
            self.monitor.guard.set_state(own["guard"])
            self.force_correction(own["forced_correction"])
            self.env_state = own["env_state"]
        if "learner_group" in state:  # otherwise restore_from_path comes, and pushes
            self._after_restore()

    def _env_state(self) -> dict[int, Any] | None:
        """State of the environments of every healthy runner; the last known one of the others."""
        if not runner_ids(self.env_runner_group):
            return self.env_state
        answers = call_runners(self.env_runner_group, _get_state).answers
        found = {runner: r.value for runner, r in answers.items() if r.error is None}
        return {**(self.env_state or {}), **found} or None

    def send_env_state(self, group: Any, ids: Sequence[int] | None = None) -> None:
        """Curriculum and problem counters of the environments, as last saved, to the given runners.

        A runner that the checkpoint did not have, of evaluation or of a larger group, gets the first one's. Raises
        CheckpointError when an environment refuses its state, as one with other tasks does.
        """
        if not self.env_state:
            return
        first = self.env_state[min(self.env_state)]
        runners = runner_ids(group) if ids is None else ids
        replies = call_runners(group, {i: _SetState(self.env_state.get(i, first)) for i in runners})
        if refused := [
            f"env runner {i}:\n{r.error}" for i, r in replies.answers.items() if r.error is not None
        ]:
            raise CheckpointError("the environment did not take its saved state:\n" + "\n".join(refused))


class _SetState:
    """A picklable call: hands a state to a runner."""

    def __init__(self, state: dict[str, Any]):
        self.state = state

    def __call__(self, runner: Any) -> Any:
        return runner.set_state_reply(self.state)


def _digest(learner: Any) -> str:
    return learner.digest()


def _get_state(runner: Any) -> Any:
    return runner.get_state_reply()

"""Pushing weights to env runners: blocking, confirmed by receipts, and under the policy's contract.

RLlib's own `sync_weights` is fire-and-forget: a push is dropped while an earlier one is unfinished, and a
runner that answered an older sequence number before a rollback keeps the newer weights under the older
label. Here every runner confirms version and hashes of what it holds, or the push is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from precision_policies import compare_attestations
from rllib_llm.algorithm.fleet import call_runners
from rllib_llm.guard import Evidence
from rllib_llm.learner.weights import ExportedWeights

if TYPE_CHECKING:
    from ray.rllib.core.learner.learner_group import LearnerGroup
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from precision_policies import Attestation, PrecisionPolicy

__all__ = ["WeightPushError", "WeightSync"]


class WeightPushError(RuntimeError):
    """Some env runner did not confirm the weights it was sent; lists each."""


class WeightSync:
    """Keeps env runners on the learner's weights and both sides on one precision policy."""

    def __init__(
        self, learner_group: LearnerGroup, policy: PrecisionPolicy, timeout_s: float, *, remote: bool
    ):
        """remote: some env runner is an actor, so that an export goes through Ray's object store."""
        self.learner_group, self.policy, self.timeout_s, self.remote = (
            learner_group,
            policy,
            timeout_s,
            remote,
        )
        self._exported: ExportedWeights | None = None
        self._sent: ExportedWeights | None = None
        self._train_side: Attestation | None = None

    @property
    def version(self) -> int | None:
        """Version of the weights that every runner was last sent."""
        return None if self._sent is None else self._sent.version

    def learner_changed(self) -> None:
        """Call after an update or a restore: the next push exports anew."""
        self._exported = None

    def push(self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None = None) -> None:
        """Sends the learner's weights to the runners (None: all healthy ones) and waits for every receipt.

        Raises WeightPushError naming each runner that refused, did not answer in time, or holds other bytes
        than were sent; PrecisionMismatchError when a runner computes under another policy, plan or set of
        operators than the learner. A runner that died meanwhile is left to RLlib's recovery.
        """
        if self._exported is None:
            self._exported = self._export()
        self._sent = sent = self._exported
        replies = call_runners(group, partial(_apply, update=sent.update), runner_ids, self.timeout_s)
        problems = [f"env runner {i}: no answer within {self.timeout_s:.0f} s" for i in replies.timed_out]
        for runner, reply in replies.answers.items():
            if reply.error is not None:
                problems.append(f"env runner {runner} refused: {reply.error.strip().splitlines()[-1]}")
                continue
            problems += [f"env runner {runner}: {p}" for p in _receipt_problems(sent, reply.value)]
        if problems:
            raise WeightPushError(
                f"weights version {sent.version} did not arrive everywhere:\n  " + "\n  ".join(problems)
            )
        self.check_contract(group, runner_ids)

    def check_contract(self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None = None) -> None:
        """Compares the attestation of each runner with the learner's, and the weights it holds with those sent.

        A receipt is what an engine says on taking an update; the attestation hashes what it then computes with.
        """
        if self._train_side is None:
            self._train_side = self._from_learner(lambda learner: learner.attest())
        train = self._train_side
        if self._sent is not None:
            train = dataclasses.replace(train, weights=dict(self._sent.hashes))
        for attestation in self._attestations(group, runner_ids).values():
            compare_attestations(self.policy, train, attestation)

    def evidence(self, group: EnvRunnerGroup) -> Evidence:
        """Fresh statements of all sides, for the guard's question who changed."""
        train, rollout = self._from_learner(lambda learner: learner.attest()), self._attestations(group)
        return Evidence(
            attestations={"train": train, **rollout},
            sent=self._sent.hashes if self._sent else {},
            held={name: a.weights for name, a in rollout.items()},
        )

    def _attestations(
        self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None = None
    ) -> dict[str, Attestation]:
        replies = call_runners(group, _attest, runner_ids, self.timeout_s)
        for runner, reply in replies.answers.items():
            if reply.error is not None:
                raise WeightPushError(f"env runner {runner} could not attest:\n{reply.error}")
        return {f"rollout/{runner}": reply.value for runner, reply in replies.answers.items()}

    def _export(self) -> ExportedWeights:
        return self._from_learner(partial(_exported, by_reference=self.remote))

    def _from_learner(self, call: Callable[[Any], Any]) -> Any:
        """Result of a call on the first learner. All learners hold equal weights (asserted at build)."""
        ids = None if self.learner_group.is_local else [0]
        [result] = self.learner_group.foreach_learner(call, remote_actor_ids=ids)
        if not result.ok:
            raise result.get()
        return result.get()


def _exported(learner: Any, by_reference: bool) -> ExportedWeights:
    return learner.exported(by_reference=by_reference)


def _apply(runner: Any, update: Any) -> Any:
    return runner.apply_weights(ray.get(update) if isinstance(update, ray.ObjectRef) else update)


def _attest(runner: Any) -> Any:
    return runner.attest_reply()


def _receipt_problems(sent: ExportedWeights, receipt: Any) -> list[str]:
    problems = []
    if receipt.version != sent.version:
        problems.append(f"holds version {receipt.version}, sent was {sent.version}")
    held = dict(receipt.hashes)
    wrong = sorted(name for name in sent.hashes if held.get(name) != sent.hashes[name])
    wrong += sorted(set(held) - set(sent.hashes))
    if wrong:
        problems.append(f"{len(wrong)} tensors differ from what was sent: {', '.join(wrong[:5])}")
    return problems

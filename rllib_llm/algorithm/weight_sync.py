"""Pushing weights to env runners: blocking, confirmed by receipts, and under the policy's contract.

RLlib's own `sync_weights` is fire-and-forget: a push is dropped while an earlier one is unfinished, and a
runner that answered an older sequence number before a rollback keeps the newer weights under the older
label. Here every runner confirms version and hashes of what it holds, or the push is an error.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import ray

from precision_policies import compare_attestations
from precision_policies.hashing import differing
from rllib_llm.algorithm.fleet import LOCAL, Replies, call_runners
from rllib_llm.errors import RllibLLMError
from rllib_llm.mismatch.guard import Evidence
from rllib_llm.settings.groups import WeightTransport
from rllib_llm.sync.stream import StreamOffer, give_up
from rllib_llm.sync.topology import STREAMED, Place, Transport, WeightTransportError, choose_transport
from rllib_llm.weights.base import base_hash, is_adapter

if TYPE_CHECKING:
    from ray.rllib.core.learner.learner_group import LearnerGroup
    from ray.rllib.env.env_runner_group import EnvRunnerGroup

    from precision_policies import Attestation, PrecisionPolicy
    from rllib_llm.sync.verify import WeightManifest

__all__ = ["WeightPushError", "WeightSync"]

logger = logging.getLogger(__name__)
Call = Callable[[Any], Any]


class _Route(NamedTuple):
    """How weights reach a runner, and whether it needs the adapters alone."""

    transport: Transport
    adapters_only: bool


class WeightPushError(RllibLLMError, RuntimeError):
    """Some env runner did not confirm the weights it was sent; lists each."""


class WeightSync:
    """Keeps env runners on the learner's weights and both sides on one precision policy."""

    def __init__(
        self,
        learner_group: LearnerGroup,
        policy: PrecisionPolicy,
        timeout_s: float,
        transport: WeightTransport = "auto",
    ):
        self.learner_group, self.policy, self.timeout_s = learner_group, policy, timeout_s
        self.transport = transport
        self._manifest: WeightManifest | None = None
        self._host_copies: dict[bool, Any] = {}  # by whether it is of adapters alone
        self._sent: WeightManifest | None = None
        self._train_side: Attestation | None = None
        self._learner_place: Place | None = None
        self._logged: dict[tuple[int, int], Transport] = {}

    @property
    def version(self) -> int | None:
        """Version of the weights that every runner was last sent."""
        return None if self._sent is None else self._sent.version

    @property
    def base_hash(self) -> str | None:
        """Hash of the weights that adapters are trained on (`rllib_llm.weights.base`), once they were sent."""
        return None if self._sent is None else base_hash(self._sent.hashes)

    @property
    def transports(self) -> dict[tuple[int, int], Transport]:
        """(identity of the runner group, runner) -> the transport that its weights took last."""
        return dict(self._logged)

    def learner_changed(self) -> None:
        """Call after an update or a restore: the next push exports anew."""
        self._manifest = None
        self._host_copies.clear()

    def push(self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None = None) -> None:
        """Sends the learner's weights to the runners (None: all healthy ones) and waits for every receipt.

        Each runner gets them by the transport that fits its engine's place (`rllib_llm.sync.topology`), or by the one
        that was asked for.

        Raises WeightPushError naming each runner that refused, did not answer in time, or holds other bytes
        than were sent; PrecisionMismatchError when a runner computes under another policy, plan or set of
        operators than the learner; WeightTransportError when the transport asked for cannot be used. A runner that
        died meanwhile is left to RLlib's recovery.
        """
        if self._manifest is None:
            self._manifest = self._from_learner(_manifest)
        self._sent = sent = self._manifest
        located = call_runners(group, _runner_place, runner_ids, self.timeout_s)
        problems = _refusals(located)
        places = {r: a.value for r, a in located.answers.items() if a.error is None}
        routes = self._routes(group, places, self._with_base(group, places))
        calls, pushes = self._calls(routes, sent)
        with self._sending(pushes) as sending:
            replies = call_runners(group, calls, (), self.timeout_s, partial(_give_up, pushes))
            problems += _refusals(replies)
            for runner, reply in replies.answers.items():
                if reply.error is None:
                    problems += [f"env runner {runner}: {p}" for p in _receipt_problems(sent, reply.value)]
            if problems:  # nobody is left whom the learner could wait for
                _give_up(pushes, problems[0])
            failed = [f"the learner could not send: {e}" for f in sending if (e := f.exception())]
        if replies.died and pushes:  # the others gave up with it: they get the weights without it
            survivors = [runner for runner in calls if runner not in replies.died]
            if survivors:
                self.push(group, survivors)
            return
        if problems or failed:
            raise WeightPushError(
                f"weights version {sent.version} did not arrive everywhere:\n  "
                + "\n  ".join(problems + failed)
            )
        self.check_contract(group, runner_ids)

    # ------------------------------------------------------------------ transports

    def _with_base(self, group: EnvRunnerGroup, runners: Collection[int]) -> set[int]:
        """Runners whose engines hold the base that the learner's adapters are on, so that only those are sent."""
        assert self._manifest is not None  # `push` has asked for it
        if not any(map(is_adapter, self._manifest.specs)):
            return set()
        call = partial(_holds_base, base=base_hash(self._manifest.hashes))
        replies = call_runners(group, call, list(runners), self.timeout_s)
        return {runner for runner, reply in replies.answers.items() if reply.error is None and reply.value}

    def _routes(
        self, group: EnvRunnerGroup, places: dict[int, Place], with_base: Collection[int]
    ) -> dict[_Route, dict[int, Place]]:
        """Runners by transport and by what they need; a choice is logged when it is new."""
        if self._learner_place is None:
            self._learner_place = self._from_learner(_learners_place)
        routes: dict[_Route, dict[int, Place]] = {}
        for runner, place in places.items():
            chosen, why = choose_transport(self._learner_place, place, self.transport)
            routes.setdefault(_Route(chosen, runner in with_base), {})[runner] = place
            if self._logged.get((id(group), runner)) != chosen:
                self._logged[id(group), runner] = chosen
                logger.info("weights to env runner %d by %s (%s)", runner, chosen, why)
        return routes

    def _calls(
        self, routes: dict[_Route, dict[int, Place]], whole: WeightManifest
    ) -> tuple[dict[int, Call], list[StreamOffer]]:
        """(what each runner is asked to do, one offer of every push that the learner must send)."""
        calls: dict[int, Call] = {}
        pushes: list[StreamOffer] = []
        for (transport, adapters_only), runners in routes.items():
            manifest = whole.of_adapters() if adapters_only else whole
            if transport in STREAMED:
                names = [place.identity for place in runners.values()]
                offers = self._from_learner(
                    partial(
                        _offer,
                        manifest=manifest,
                        transport=transport,
                        engines=names,
                        timeout_s=self.timeout_s,
                    )
                )
                calls |= {r: partial(_apply, update=o) for r, o in zip(runners, offers, strict=True)}
                pushes.append(offers[0])
                continue
            if transport == "in_process":
                update = self._from_learner(partial(_in_process, manifest=manifest))
            else:
                update = self._host_update(LOCAL not in runners, manifest.base)
            calls |= dict.fromkeys(runners, partial(_apply, update=update))
        return calls, pushes

    def _host_update(self, by_reference: bool, base: str | None) -> Any:
        kind = base is not None
        if kind not in self._host_copies:
            call = partial(_exported, by_reference=by_reference, base=base)
            self._host_copies[kind] = self._from_learner(call).update
        return self._host_copies[kind]

    @contextmanager
    def _sending(self, pushes: list[StreamOffer]) -> Iterator[list[Future[None]]]:
        """While open, the learner sends, one push after the other, beside what this thread does."""
        if not pushes:
            yield []
            return
        with ThreadPoolExecutor(1, thread_name_prefix="weight_sync") as pool:
            sending = [pool.submit(self._from_learner, partial(_send, push=offer.push)) for offer in pushes]
            try:
                yield sending
            except BaseException as error:  # else the pool would wait for a learner that waits for an engine
                _give_up(pushes, f"the driver: {error}")
                raise

    def check_contract(self, group: EnvRunnerGroup, runner_ids: Sequence[int] | None = None) -> None:
        """Compares the attestation of each runner with the learner's, and the weights it holds with those sent.

        A receipt is what an engine says on taking an update; the attestation hashes what it then computes with.
        """
        if self._train_side is None:
            self._train_side = self._from_learner(lambda learner: learner.weight_source.attest())
        train = self._train_side
        if self._sent is not None:
            train = dataclasses.replace(train, weights=dict(self._sent.hashes))
        for attestation in self._attestations(group, runner_ids).values():
            compare_attestations(self.policy, train, attestation)

    def evidence(self, group: EnvRunnerGroup) -> Evidence:
        """Fresh statements of all sides, for the guard's question who changed."""
        train, rollout = (
            self._from_learner(lambda learner: learner.weight_source.attest()),
            self._attestations(group),
        )
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

    def _from_learner(self, call: Callable[[Any], Any]) -> Any:
        """Result of a call on the first learner. All learners hold equal weights (asserted at build)."""
        ids = None if self.learner_group.is_local else [0]
        [result] = self.learner_group.foreach_learner(partial(_guarded, call=call), remote_actor_ids=ids)
        if not result.ok:
            raise result.get()
        value = result.get()
        if isinstance(value, WeightTransportError):
            raise value
        return value


def _exported(learner: Any, by_reference: bool, base: str | None) -> Any:
    return learner.weight_source.exported(learner.weights_version, by_reference=by_reference, base=base)


def _manifest(learner: Any) -> WeightManifest:
    manifest: WeightManifest = learner.weight_source.manifest(learner.weights_version)
    return manifest


def _learners_place(learner: Any) -> Place:
    place: Place = learner.weight_source.place()
    return place


def _in_process(learner: Any, manifest: WeightManifest) -> Any:
    return learner.weight_source.in_process_update(manifest)


def _offer(
    learner: Any, manifest: WeightManifest, transport: Transport, engines: list[str], timeout_s: float
) -> list[StreamOffer]:
    offers: list[StreamOffer] = learner.weight_source.offer(manifest, transport, engines, timeout_s)
    return offers


def _send(learner: Any, push: str) -> None:
    learner.weight_source.send(push)


def _guarded(learner: Any, call: Call) -> Any:
    """A broken push as a value: RLlib takes a learner whose method raises out of service, and this one is well."""
    try:
        return call(learner)
    except WeightTransportError as error:
        logger.warning("weight push: %s", error)
        return error


def _give_up(pushes: list[StreamOffer], why: str) -> None:
    """End pushes, so that neither the learner nor other engines wait for one that does not take part any more."""
    for offer in pushes:
        try:
            give_up(offer, why)
        except RuntimeError as error:  # the learner's store is gone, and with it whoever waited there
            logger.warning("a weight push could not be called off: %s", error)


def _runner_place(runner: Any) -> Any:
    return runner.place_reply()


def _holds_base(runner: Any, base: str) -> Any:
    return runner.holds_base_reply(base)


def _apply(runner: Any, update: Any) -> Any:
    return runner.apply_weights(ray.get(update) if isinstance(update, ray.ObjectRef) else update)


def _attest(runner: Any) -> Any:
    return runner.attest_reply()


def _refusals(replies: Replies) -> list[str]:
    """Runners that answered with an error, or not in time."""
    silent = [f"env runner {i}: no answer in time" for i in replies.timed_out]
    return silent + [
        f"env runner {runner} refused: {reply.error.strip().splitlines()[-1]}"
        for runner, reply in replies.answers.items()
        if reply.error is not None
    ]


def _receipt_problems(sent: WeightManifest, receipt: Any) -> list[str]:
    problems = []
    if receipt.version != sent.version:
        problems.append(f"holds version {receipt.version}, sent was {sent.version}")
    if wrong := list(differing(sent.hashes, receipt.hashes)):
        problems.append(f"{len(wrong)} tensors differ from what was sent: {', '.join(wrong[:5])}")
    return problems

"""The transport of weights follows from where learner and engine are, and can be asked for where it exists."""

from __future__ import annotations

import dataclasses
import os
from typing import get_args

import pytest

from rllib_llm.settings.groups import WeightTransport
from rllib_llm.sync.topology import Place, WeightTransportError, choose_transport, place_of

LEARNER = Place("host-a", 1, "cuda", "GPU-0", True, "learner")
ENGINES = {
    "same process": dataclasses.replace(LEARNER, identity="e"),
    "same GPU": dataclasses.replace(LEARNER, pid=2),
    "other GPU of the host": dataclasses.replace(LEARNER, pid=2, gpu="GPU-1"),
    "other host": dataclasses.replace(LEARNER, host="host-b", pid=1, gpu="GPU-7"),
    "other GPU, no NCCL": dataclasses.replace(LEARNER, pid=2, gpu="GPU-1", nccl=False),
    "CPU": dataclasses.replace(LEARNER, pid=2, device="cpu", gpu=None),
}
CHOSEN = {
    "same process": "in_process",
    "same GPU": "cuda_ipc",
    "other GPU of the host": "nccl",
    "other host": "nccl",
    "other GPU, no NCCL": "object_store",
    "CPU": "object_store",
}
POSSIBLE = {
    "same process": {"object_store"},
    "same GPU": {"cuda_ipc", "gloo", "object_store"},
    "other GPU of the host": {"nccl", "gloo", "object_store"},
    "other host": {"nccl", "gloo", "object_store"},
    "other GPU, no NCCL": {"gloo", "object_store"},
    "CPU": {"gloo", "object_store"},
}


@pytest.mark.parametrize("name", ENGINES)
def test_auto_takes_the_closest_transport_that_exists(name: str) -> None:
    """Same process, same GPU, other GPU, no GPU: one transport each, with a reason for what was passed over."""
    transport, why = choose_transport(LEARNER, ENGINES[name])
    assert transport == CHOSEN[name]
    if transport == "object_store":
        assert "no cuda_ipc: " in why
        assert "no nccl: " in why


@pytest.mark.parametrize("name", ENGINES)
def test_what_is_asked_for_is_taken_or_refused(name: str) -> None:
    """A transport that cannot be used between two places is an error naming both; the others are taken as asked."""
    for wanted in set(get_args(WeightTransport)) - {"auto"}:
        if wanted in POSSIBLE[name]:
            assert choose_transport(LEARNER, ENGINES[name], wanted) == (wanted, "asked for")
        else:
            with pytest.raises(
                WeightTransportError, match=f"weight_transport={wanted}: .*learner: process 1"
            ):
                choose_transport(LEARNER, ENGINES[name], wanted)


def test_an_unknown_transport_lists_the_known_ones() -> None:
    """A misspelt transport is not auto."""
    with pytest.raises(ValueError, match="cuda_ipc, nccl, gloo, object_store"):
        choose_transport(LEARNER, LEARNER, "ipc")  # type: ignore[arg-type]


def test_places_of_one_process_differ_in_identity_only() -> None:
    """Two engines of a process have one place; each is told apart from an earlier one by its identity."""
    one, two = place_of("cpu"), place_of("cpu")
    assert one.pid == os.getpid()
    assert dataclasses.replace(one, identity="") == dataclasses.replace(two, identity="")
    assert one.identity != two.identity

"""Starting Ray, or joining one, for commands that train."""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rllib_llm.cli.signals import kept_handler
from rllib_llm.errors import InputError, RllibLLMError
from rllib_llm.process.ray_head import RayHead, RayWatch

if TYPE_CHECKING:
    from rllib_llm.experiment.sections import ResourceSettings

__all__ = ["RayUnavailableError", "running_ray"]

# Read by Ray when it starts: quiet console, no usage report, workers that keep the driver's directory (Tune would
# change into the trial's, and a relative path of the config would then point elsewhere in every process).
_RAY_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AUTH_MODE": "disabled",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}


_ANSWER_S = 10.0
_PER_CORE = 4
"""CPUs that a local Ray may declare for each core of the machine; a one-core machine runs the quickstart."""


class RayUnavailableError(RllibLLMError, InputError, RuntimeError):
    """The cluster of `run.resources.ray_address` cannot be joined."""


@contextmanager
def running_ray(resources: ResourceSettings, config: Any) -> Iterator[RayWatch | None]:
    """Ray, started or joined, while it is entered, for trials of `config` (a GRPOConfig). One that runs already stays,
    and is not watched: None.

    A local Ray declares `ray_cpus` CPUs, or `cpus_to_declare`. Raises RayUnavailableError,
    and PlacementError where a trial asks for more than there is: Tune would wait for ever.
    """
    import ray

    from rllib_llm.algorithm.grpo import GRPO
    from rllib_llm.algorithm.placement import require_placeable

    for name, value in _RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray.tune").setLevel(logging.ERROR)
    # a failed trial is reported by the command, with its error
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)
    request = GRPO.default_resource_request(config)
    started, watch = not ray.is_initialized(), None
    try:
        if started and resources.ray_address:
            with kept_handler():
                _join(resources.ray_address)
        elif started:
            cpus = resources.ray_cpus or cpus_to_declare(request.required_resources.get("CPU", 1))
            with _ignored(signal.SIGHUP), kept_handler():
                ray.init(
                    address="local",  # whatever RAY_ADDRESS says
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.WARNING,
                )
        require_placeable(request.bundles)
        if started:
            watch = RayWatch(RayHead(joined=bool(resources.ray_address)))
        yield watch
    finally:
        if watch is not None:
            watch.hand_over()
            watch.stop()
        if started:
            ray.shutdown()


def cpus_to_declare(needed: float) -> int:
    """The machine's cores, or what one trial needs where that is at most `_PER_CORE` for each: its processes mostly
    wait for one another. A trial that needs more is then refused as one that can never be placed."""
    cores, whole = os.cpu_count() or 1, math.ceil(needed)
    return whole if cores < whole <= _PER_CORE * cores else cores


@contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Processes started meanwhile ignore the signal for good, and so do theirs: a terminal that closes sends SIGHUP to
    Ray's too, which the run still needs for its checkpoint (`interrupt`). Ray itself blocks SIGINT so.
    """
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _join(address: str) -> None:
    """Ray itself tries for minutes to reach a host that does not answer, and then ends the process."""
    import ray

    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
        ray.init(address=address, log_to_driver=False)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        reason = " ".join(str(error).split())
        raise RayUnavailableError(
            f"run.resources.ray_address = {address!r}: cannot be joined ({reason}). Start a cluster there with `ray "
            "start --head`, name the address of one that runs, or null to start Ray on this machine."
        ) from error

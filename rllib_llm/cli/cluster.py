"""Starting Ray, or joining one, for commands that train."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rllib_llm.experiment import ResourceSettings

__all__ = ["start_ray"]

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


def start_ray(resources: ResourceSettings, config: Any) -> bool:
    """Start or join Ray for trials of `config` (a GRPOConfig); True where it was started here.

    A local Ray declares `ray_cpus` CPUs, or the machine's, or as many as one trial needs. Raises PlacementError where a
    trial asks for more than there is: Tune would wait for ever.
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
    started = not ray.is_initialized()
    if started and resources.ray_address:
        ray.init(address=resources.ray_address, log_to_driver=False)
    elif started:
        needed = int(-(-request.required_resources.get("CPU", 1) // 1))
        cpus = resources.ray_cpus or max(os.cpu_count() or 1, needed)
        ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.WARNING)
    try:
        require_placeable(request.bundles)
    except ValueError:
        if started:
            ray.shutdown()
        raise
    return started

"""The Ray actor that owns a vLLM, seen from its caller: started with the right environment, called with our errors."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from precision_policies import PrecisionPolicy
from rllib_llm.engines.base import PromptError, SamplingParamsError
from rllib_llm.engines.vllm import compat
from rllib_llm.engines.vllm.worker import VLLMWorker, WorkerOptions
from rllib_llm.errors import EngineError
from rllib_llm.process.kernel_cache import CACHE_VARIABLE, kernel_cache
from rllib_llm.sync.packed import WeightSyncError

logger = logging.getLogger(__name__)
_PROCESS_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are written and hashed in the process that computes
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DEEP_GEMM_WARMUP": "skip",  # its own layers are not used; minutes of JIT otherwise
    "HF_HUB_OFFLINE": "1",
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class VLLMActor:
    """A `VLLMWorker` in a process of its own.

    Args:
        directory: where vLLM finds config.json.
        num_gpus, num_cpus: what the actor asks of Ray. 0 GPUs on a GPU means: those of this process.
        call_timeout_s: an actor that does not answer a call in this time is killed.
    """

    def __init__(
        self,
        directory: str,
        policy: PrecisionPolicy,
        options: WorkerOptions,
        *,
        num_gpus: float,
        num_cpus: float,
        call_timeout_s: float,
    ) -> None:
        environment = _PROCESS_ENVIRONMENT | policy.environment(engine="vllm", device=options.device)
        if options.device == "cuda":
            # vLLM would choose a directory of its own, and kernels would be compiled twice (vllm/utils/deep_gemm.py).
            environment[CACHE_VARIABLE] = str(kernel_cache())
        if options.device == "cuda" and not num_gpus:
            # Ray hides the GPUs from an actor that reserves none; this one shares those of the env runner.
            environment["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
            if "CUDA_VISIBLE_DEVICES" in os.environ:
                environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
        remote = ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_restarts=0)(VLLMWorker)
        compat.warn_if_not_run(options.device)
        logger.info("starting vLLM %s on %s", compat.vllm_version(), options.device)
        self._call_timeout_s = call_timeout_s
        self._handle: Any = remote.options(runtime_env={"env_vars": environment}).remote(
            directory, policy.to_dict(), options
        )

    @property
    def alive(self) -> bool:
        """False after `kill`, and after an error that ended the process."""
        return self._handle is not None

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Result of a method of the worker.

        Raises:
            WeightSyncError, EngineError, PromptError, SamplingParamsError: what the worker refused, as it raised it.
            EngineError: the process died, failed otherwise, or did not answer in time; it is then killed.
        """
        timeout_s = self._call_timeout_s if timeout_s is None else timeout_s
        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=timeout_s)
        except GetTimeoutError:
            self.kill()
            raise EngineError(
                f"vLLM did not answer {method} within {timeout_s:.0f} s and was killed: make a new engine"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, WeightSyncError | EngineError | PromptError | SamplingParamsError):
                raise error.cause from None
            self.kill()
            raise EngineError(f"vLLM failed in {method} and was stopped: {error}") from error
        except RayActorError as error:
            self.kill()
            raise EngineError(f"the vLLM process died in {method}: {error}; make a new engine") from error

    def inspect(self, function: Any) -> Any:
        """Result of ``function(worker)`` in the engine's process: for tests and debugging."""
        return ray.get(self._handle.__ray_call__.remote(function), timeout=self._call_timeout_s)

    def kill(self) -> None:
        """End the process. Idempotent."""
        if self._handle is not None:
            with contextlib.suppress(Exception):  # a Ray that has been shut down has killed the actor already
                ray.kill(self._handle)
        self._handle = None


def config_directory(path: Path | None, config: Any) -> Any:
    """A temporary directory with config.json (and the tokenizer, where there is one) for vLLM to start from."""
    directory = tempfile.TemporaryDirectory(prefix="rllib_llm_vllm_")
    config.save_pretrained(directory.name)
    if path is not None:
        for file in path.iterdir():
            if (
                file.is_file()
                and file.suffix in (".json", ".model", ".jinja", ".txt")
                and file.name != "config.json"
            ):
                shutil.copyfile(file, Path(directory.name) / file.name)
    return directory


def has_tokenizer(path: Path | None) -> bool:
    """Whether a model directory has the files of a tokenizer that vLLM reads."""
    return path is not None and any((path / name).is_file() for name in _TOKENIZER_FILES)

"""The process of vLLM as its caller sees it: refusals pass, everything else ends the process with a named error."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from precision_policies import load_policy
from rllib_llm.engines import EngineError
from rllib_llm.engines.vllm import actor as module
from rllib_llm.engines.vllm.worker import WorkerOptions
from rllib_llm.sync.packed import WeightSyncError

OPTIONS = WorkerOptions(
    device="cpu", max_model_len=8, max_num_seqs=1, max_num_batched_tokens=None, kv_cache_bytes=None,
    gpu_memory_utilization=0.1, enable_prefix_caching=False, cuda_graphs=False, sleep_mode=False, has_tokenizer=False,
    seed=0,
)  # fmt: skip


class Worker:
    """In place of the one that imports vLLM."""

    def __init__(self, directory: str, policy: dict[str, Any], options: WorkerOptions) -> None:
        self.arguments = (directory, policy["name"], options.device)

    def ready(self) -> Any:
        return self.arguments, os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]

    def refuse(self) -> None:
        raise WeightSyncError(["x: missing"], 3)

    def fail(self) -> None:
        raise ZeroDivisionError("planted")

    def hang(self) -> None:
        time.sleep(3600)

    def die(self) -> None:
        os._exit(1)


ENDS = {
    "fail": "vLLM failed in fail and was stopped(?s:.*)planted",
    "hang": "did not answer hang within 1 s and was killed",
    "die": "the vLLM process died in die",
}


def test_refusals_pass_and_whatever_else_happens_ends_the_process(
    ray_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the worker refuses reaches the caller with its list, and the process lives; an unforeseen error, silence
    beyond the timeout and a dead process are an EngineError each: nothing hangs, and nothing is left."""
    monkeypatch.setattr(module, "VLLMWorker", Worker)
    monkeypatch.setattr(module.compat, "vllm_version", lambda: "none")
    sizes = {"num_gpus": 0, "num_cpus": 0, "call_timeout_s": 600}
    actors = {how: module.VLLMActor("d", load_policy("bf16"), OPTIONS, **sizes) for how in ENDS}
    for how, actor in actors.items():
        with pytest.raises(WeightSyncError) as caught:
            actor.call("refuse")
        assert (caught.value.violations, caught.value.version) == (("x: missing",), 3)
        assert actor.call("ready") == (("d", "bf16", "cpu"), "0")
        assert actor.inspect(lambda worker: worker.arguments[0]) == "d"
        with pytest.raises(EngineError, match=ENDS[how]):
            actor.call(how, timeout_s=1 if how == "hang" else None)
        assert not actor.alive
        actor.kill()

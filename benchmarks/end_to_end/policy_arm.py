"""One visit of an arm that is a precision policy: GRPO through RLlib, rows appended as iterations end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])  # for Ray's workers


def config_of(task: dict[str, Any]) -> Any:
    """The arm's GRPOConfig."""
    from rllib_llm import GRPOConfig

    options: dict[str, Any] = {"device": task["device"]}
    if task["engine"] == "vllm":
        options |= {
            "kv_cache_bytes": task["kv_gib"] << 30, "gpu_memory_utilization": 0.5,
            "max_num_seqs": task["sequences"], "max_num_batched_tokens": 8192,
        }  # fmt: skip
    policy = {
        "extends": task["arm"], "name": Path(task["arm"]).stem + "-e2e", "master_dtype": task["masters"],
        "optimizer_state_dtype": task["moments"],
    }  # fmt: skip
    config = (
        GRPOConfig()
        .precision(policy)
        .model(
            task["model"],
            max_sequence_length=task["prompt"] + task["answer"] + 8,
            gradient_checkpointing=task["device"] == "cuda",
        )
        .environment("model:Digits", env_config={"characters": task["prompt"]})
        .rollout(
            engine=task["engine"],
            engine_options=options,
            group_size=task["group"],
            prompts_per_iteration=task["prompts"],
            max_new_tokens=task["answer"],
        )
        .training(lr=1e-6, micro_batch_tokens=task["micro_batch_tokens"])
    )
    gpus = 1 if task["device"] == "cuda" else 0
    return config.learners(num_learners=0, num_gpus_per_learner=gpus)


def row_of(task: dict[str, Any], iteration: int, seconds: float, result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an iteration."""
    learner = result["learners"]["default_policy"]
    return {
        "arm": task["arm"],
        "turn": task["turn"],
        "iteration": iteration,
        "seconds": seconds,
        "since_start_s": time.time() - task["begun"],
        "phases": {k: float(v) for k, v in result["timers"].items() if isinstance(v, int | float)},
        "tokens": float(learner["num_tokens"]),
        "grad_norm": float(learner["grad_norm"]),
        "mismatch": {k: float(result["mismatch"][k]) for k in ("max_abs", "mean_abs", "bit_equal_share")},
        "memory": {k: float(v) for k, v in result["memory"].items()},
    }


def main(task: dict[str, Any]) -> None:
    """Build, train, append rows."""
    import ray

    ray.init(include_dashboard=False, log_to_driver=True)
    algorithm = config_of(task).build_algo()
    print(f"built {time.time() - task['begun']:.1f} s after the start", flush=True)
    try:
        for iteration in range(1, task["iterations"] + 1):
            begin = time.time()
            result = algorithm.train()
            row = row_of(task, iteration, time.time() - begin, result)
            print(json.dumps(row), flush=True)
            with Path(task["rows"]).open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(row) + "\n")
    finally:
        algorithm.stop()
        ray.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

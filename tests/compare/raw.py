"""Raw results made up for tests: arms whose curves are known exactly."""

from __future__ import annotations

import math

from rllib_llm.compare import CurveWriter

REWARD = "env_runners/episode_return_mean"


def rising(iteration, final=0.8, start=0.5):
    """A reward that goes from `start` to `final` in 20 iterations and stays there."""
    return start + (final - start) * min(1.0, iteration / 20)


def row(reward, k3=0.0, tokens=100.0):
    return {
        REWARD: reward,
        "mismatch/k3": k3,
        "mismatch/max_abs": 40 * k3,
        "mismatch/bit_equal_share": float(k3 == 0),
        "mismatch/by_position/0-31/k3": k3,
        "mismatch/by_position/0-31/num_tokens": 30.0,
        "mismatch/by_position/32-127/k3": 2 * k3,
        "mismatch/by_position/32-127/num_tokens": 70.0,
        "timers/sample": 2.0,
        "timers/learn": 1.0,
        "timers/push_weights": 0.5,
        "env_runners/num_tokens_sampled": tokens,
        "learners/default_policy/num_tokens": tokens / 2,
        "memory/learner_rss_peak_gib": 1.25,
    }


def write(directory, arms, seeds=5, iterations=40, k3=None):
    """arms: name -> function of (iteration, seed) giving the reward, or None where the run has ended."""
    writer = CurveWriter(directory)
    for arm, reward in arms.items():
        for seed in range(seeds):
            for iteration in range(1, iterations + 1):
                value = reward(iteration, seed)
                if value is not None:
                    writer.row(arm, seed, iteration, row(value, (k3 or {}).get(arm, 0.0)))
    writer.describe(
        planned={"arms": list(arms), "seeds": list(range(seeds)), "iterations": iterations},
        environment={"version.torch": "9.9", "hardware.gpu_names": "<b>GPU & co</b>"},
        arms={arm: {"policy": arm, "fingerprint": "f" * 64} for arm in arms},
    )
    return writer


def noise(iteration, seed, scale=0.01):
    """The same at every call, mean about zero."""
    return scale * math.sin(12.9898 * iteration + 78.233 * seed)

"""The losses once more, in plain Python floats and loops, straight from the papers; value and gradient per
token.

Deliberately shares nothing with rllib_llm.losses. Returns (loss_sum, gradient per packed token, count).
"""

from __future__ import annotations

import math

from tests.losses.batches import Response

CLIP = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "rloo": (0.2, 0.2),
    "reinforce++": (0.2, 0.2),
}
MAX_TOKENS = 7


def loss(
    name: str, batch: list[Response], kl: float = 0.0, kind: str = "k3", entropy: float = 0.0
) -> tuple[float, list[float], float]:
    total, gradient, count = 0.0, [], 0.0
    for r in batch:
        value, grads, units = _one(name, r, kl, kind, entropy)
        total, count = total + value, count + units
        gradient += grads
    return total, gradient, count


def _one(name: str, r: Response, kl: float, kind: str, entropy: float) -> tuple[float, list[float], float]:
    grads = [0.0] * len(r.mask)
    length = len(r.trained)
    if length == 0:
        return 0.0, grads, 0.0
    low, high = CLIP[name]
    mean = name in ("grpo", "gspo", "reinforce++")
    value = 0.0
    log_ratios = {t: r.logp[t] - r.old[t] for t in r.trained}
    for t in r.trained:
        if name == "gspo":
            ratio = math.exp(sum(log_ratios.values()) / length)
        elif name == "rloo":
            ratio = math.exp(sum(log_ratios.values()))
        else:
            ratio = math.exp(log_ratios[t])
        gone = (r.advantage > 0 and ratio > 1 + high) or (r.advantage < 0 and ratio < 1 - low)
        if name == "rloo":
            policy = 0.0 if gone else -r.advantage * ratio * r.logp[t]
            slope = 0.0 if gone else -r.advantage * ratio
        else:
            bounded = min(max(ratio, 1 - low), 1 + high)
            policy = -min(ratio * r.advantage, bounded * r.advantage)
            slope = 0.0 if gone else -r.advantage * ratio
        term, term_slope = policy * r.weight[t], slope * r.weight[t]
        d = r.ref[t] - r.logp[t]
        estimate, estimate_slope = {
            "k1": (-d, 1.0),
            "k2": (d * d / 2, -d),
            "k3": (math.exp(d) - 1 - d, 1 - math.exp(d)),
        }[kind]
        scale = 1 / length if mean else 1.0
        # KL and entropy are nats per token whatever the policy term is divided by
        nats = {"dapo": 1.0, "dr_grpo": MAX_TOKENS / length}.get(name, 1 / length)
        value += term * scale + (kl * estimate - entropy * r.entropy[t]) * nats
        grads[t] = term_slope * scale + kl * estimate_slope * nats
    units = {"dapo": float(length), "dr_grpo": float(MAX_TOKENS)}.get(name, 1.0)
    return value, grads, units

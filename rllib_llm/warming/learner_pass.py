"""Meeting the kernels that no list names: a learner's step and an engine's forward on a model of a layer or two.

Widths, formats and sizes are the run's, weights and tokens are random. A worker process runs `learner_pass` after
DeepGEMM's kernels are there (`rllib_llm.warming.ahead`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from precision_policies import AdapterSpec, PrecisionPolicy, load_policy
from rllib_llm.learner.gradients import Gradients
from rllib_llm.learner.micro_batch import MicroBatch, Shard
from rllib_llm.learner.module import low_halves, score
from rllib_llm.learner.optimizer import PolicyAdamW
from rllib_llm.models.adapters import initialise_adapters
from rllib_llm.models.batch import PackedBatch
from rllib_llm.models.causal_lm import CausalLM, build_model
from rllib_llm.models.checkpoint import load_config
from rllib_llm.models.layers import Side
from rllib_llm.models.paths import resolve_model_path
from rllib_llm.models.sampling_distribution import SamplingDistribution
from rllib_llm.process.attest import prepare_process
from rllib_llm.sync.export import export_manifest

__all__ = ["STEPS", "learner_pass"]

STEPS = (
    "model",
    "log-probs",
    "micro-batch",
    "small micro-batch",
    "optimiser step",
    "export",
    "engine's forward",
)
_FEW = 17
"""Triton compiles numbers of rows that are multiples of 16 apart from others, and one row too."""


def learner_pass(task: Mapping[str, Any]) -> Iterator[str]:
    """Build the model, train it on two micro-batches, export it and run the export. Yields `STEPS`, one by one.

    task: model (a directory), policy and adapter (as dicts), gradient_checkpointing, tokens (of a micro-batch), longest
    (tokens of a sequence), temperature, top_k, top_p, entropy (whether the loss has a gradient of it), device.
    """
    policy, device = _policy(task["policy"]), torch.device(task["device"])
    prepare_process(policy, "torch", device.type)
    lm = _model(task, policy, "train", device)
    yield STEPS[0]
    params = [p for p in lm.parameters() if p.requires_grad]
    gradients = Gradients(params)
    optimizer = PolicyAdamW(
        params, lr=1e-6, state_dtype=policy.optimizer_state_dtype, low_halves=low_halves(lm)
    )
    distribution = SamplingDistribution(task["temperature"], task["top_k"], task["top_p"])
    vocab, longest = lm.architecture.vocab, task["longest"]
    large, small = (
        micro_batch(tokens, longest, vocab, device) for tokens in (task["tokens"], min(_FEW, longest))
    )
    with torch.no_grad():
        score(lm, large, distribution)
    yield STEPS[1]
    gradients.zero()
    for step, micro in zip(STEPS[2:4], (large, small), strict=True):
        scores = score(lm, micro, distribution)
        loss = -scores.logp.mean()
        (loss - scores.entropy.mean() if task["entropy"] else loss).backward()
        gradients.accumulate()
        yield step
    taken = gradients.take()
    gradients.unscale_and_norm(taken, 1.0)
    optimizer.update(taken, 0.5, gradients.release)
    yield STEPS[4]
    export_manifest(lm, 1)
    engine = _model(task, policy, "rollout", device)
    engine.load_rollout_tensors(lm.rollout_tensors(again=True))
    engine.weight_hashes()
    yield STEPS[5]
    engine.fuse_operators()
    with torch.inference_mode():
        for tokens in (task["tokens"], min(_FEW, longest), 1):
            batch = _packed(tokens, longest, vocab, device)
            engine.logits(engine(batch)[-_FEW:])
            engine.logits(engine(batch)[-1:])
    if device.type == "cuda":
        torch.cuda.synchronize()
    yield STEPS[6]


def _policy(given: Mapping[str, Any]) -> PrecisionPolicy:
    """The policy with, where it exempts some modules, the first layer of two exempt."""
    exempts = any(given["exempt"].values())
    exempt = {"modules": [], "first_layers": int(exempts), "last_layers": 0}
    return load_policy({**given, "exempt": exempt})


def _model(task: Mapping[str, Any], policy: PrecisionPolicy, side: Side, device: torch.device) -> CausalLM:
    """The run's model with few layers, made on the device; the train side with random weights."""
    config = copy.deepcopy(load_config(resolve_model_path(task["model"])))
    config.num_hidden_layers = 2 if policy.exempt.first_layers else 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    checkpointing = bool(task["gradient_checkpointing"]) and side == "train"
    with torch.device(device):
        lm = build_model(
            config, policy, side, gradient_checkpointing=checkpointing, adapter=_adapter(task["adapter"])
        )
        if side == "train":
            for _, module, suffix in lm.base():
                shape = module.plan.shape if suffix == "weight" else module.plan.shape[:1]
                module.set_master(suffix, torch.randn(shape) * lm.architecture.init_std)
    if side == "train":
        initialise_adapters(lm)
    return lm


def _adapter(given: Mapping[str, Any] | None) -> AdapterSpec | None:
    """The run's adapters, on every layer: a target may name one that is not built here."""
    if given is None:
        return None
    targets = given["targets"]
    if not isinstance(targets, str):
        targets = sorted({target.rpartition(".")[2] for target in targets})
    return AdapterSpec.from_dict({**given, "targets": targets})


def _lengths(tokens: int, longest: int) -> list[int]:
    """Of sequences with so many tokens together; one of a single token is left out where there are others."""
    whole, rest = divmod(tokens, longest)
    return [longest] * whole + ([rest] if rest > 1 or not whole else [])


def micro_batch(tokens: int, longest: int, vocab: int, device: torch.device) -> MicroBatch:
    """Random tokens, all but the first of each sequence trained."""
    lengths = torch.tensor(_lengths(tokens, longest), device=device)
    total, count = int(lengths.sum()), len(lengths)
    trained = torch.ones(total, dtype=torch.bool, device=device)
    trained[torch.cumsum(lengths, 0) - lengths] = False
    shard = Shard(
        lengths=lengths,
        sequence_index=torch.arange(count, device=device),
        advantages=torch.ones(count, device=device),
        minibatch=torch.zeros(count, 1, dtype=torch.int64, device=device),
        token_ids=torch.randint(vocab, (total,), device=device),
        trained=trained,
        rollout_logprobs=torch.zeros(total, device=device),
    )
    return MicroBatch.of(shard, range(count))


def _packed(tokens: int, longest: int, vocab: int, device: torch.device) -> PackedBatch:
    sequences = [torch.randint(vocab, (length,)) for length in _lengths(tokens, longest)]
    return PackedBatch.from_sequences(sequences).to(device)

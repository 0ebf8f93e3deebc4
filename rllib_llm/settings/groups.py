# ruff: noqa: RUF009 - `setting` makes a dataclass field

"""Every setting of a run: one frozen dataclass per section, each field with its type, default, range and meaning.

A setting has one dotted name, section and field: `rollout.temperature` in a YAML file, on the command line, in errors
and in a Tune search space (there also with a slash), `.rollout(temperature=...)` in Python. `settings.read` makes these
objects from plain dicts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from precision_policies import AdapterSpec, PrecisionPolicy
from precision_policies.coerce import setting
from precision_policies.schema import CorrectionKind

__all__ = [
    "GROUPS",
    "SECTIONS",
    "AdapterSettings",
    "CorrectionSettings",
    "EnvSettings",
    "EvaluationSettings",
    "GateSettings",
    "ModelSettings",
    "PrecisionSettings",
    "ResourceSettings",
    "RolloutSettings",
    "RunSettings",
    "Settings",
    "TrackingSettings",
    "TrainSettings",
    "WeightTransport",
]

WeightTransport = Literal["auto", "cuda_ipc", "nccl", "gloo", "object_store"]
"""Values of the setting `rollout.weight_transport`.

cuda_ipc: engine and learner compute on the same GPU; the engine's process reads the learner's buffer.
nccl: on different GPUs, of one node or of several; a broadcast from the learner to all such engines.
gloo: the same broadcast over TCP through host memory, for processes without a GPU or without NCCL.
object_store: host memory and Ray's object store; works everywhere and needs a host copy of all weights.
auto: `in_process` where both are one process, else the first of cuda_ipc, nccl, object_store that can be used.
"""

_GREEDY = (
    "a greedy sample has no log-probability to train on; greedy evaluation is rollout.eval_temperature = 0"
)


@dataclass(frozen=True)
class PrecisionSettings:
    """`.precision(...)`"""

    policy: str | dict = setting(
        "unified-fp8", "name of a shipped policy, path of a YAML file, or the policy itself"
    )
    allow_precision_change: bool = setting(
        False, "let a checkpoint be restored under another policy than the one it was written with"
    )


@dataclass(frozen=True)
class AdapterSettings:
    """Low-rank adapters (LoRA) on a frozen model: only they are trained, pushed and kept in checkpoints."""

    rank: int = setting(16, "r, of A [r, in] and B [out, r]", low=1, high=256)
    alpha: float = setting(32.0, "B (A x) is multiplied by alpha / rank", above=0.0)
    use_rslora: bool = setting(False, "by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)")
    targets: str | tuple[str, ...] = setting(
        "all-linear",
        "all-linear (every projection, not lm_head), or names of linears such as [q_proj, v_proj]",
    )
    dropout: float = setting(
        0.0,
        "must be 0",
        low=0.0,
        high=0.0,
        hint="the engine samples without dropout, so the learner would train another function than was sampled from",
    )
    use_dora: bool = setting(False, "must be false")
    init: Literal["default", "gaussian"] = setting(
        "default", "how A starts, B is 0: PEFT's init_lora_weights True (uniform), or gaussian"
    )
    seed: int = setting(0, "of the random A", low=0, high=2**63 - 1)
    path: str | None = setting(
        None,
        "PEFT directory to start from, of the same rank, scale and targets; null starts with new adapters",
    )

    def spec(self) -> AdapterSpec:
        """What of it decides the function that is computed."""
        return AdapterSpec(self.rank, self.alpha, self.targets, self.use_rslora)


@dataclass(frozen=True)
class ModelSettings:
    """`.model(...)`"""

    path: str | None = setting(
        None, "directory in Hugging Face format, models:/NAME@ALIAS, or a shipped model (tiny-chain)"
    )
    gradient_checkpointing: bool = setting(
        False, "recompute each layer in backward: less memory, about a third more compute"
    )
    reference_path: str | None = setting(
        None, "frozen model for the KL term; null means path, the weights that training starts from"
    )
    max_sequence_length: int | None = setting(
        None,
        "longest prompt plus completion in tokens; null means the model's max_position_embeddings",
        low=2,
    )
    adapter: AdapterSettings | None = setting(
        None, "train low-rank adapters on the frozen model, e.g. {rank: 16}; null trains all weights"
    )


@dataclass(frozen=True)
class RolloutSettings:
    """`.rollout(...)`"""

    engine: str = setting(
        "torch", "what samples: torch (embedded, any device) or vllm", choices="torch | vllm"
    )
    engine_options: dict = setting({}, "passed to the engine's constructor")
    group_size: int = setting(8, "completions sampled for one prompt", low=1)
    prompts_per_iteration: int = setting(16, "prompts of one training iteration, over all env runners", low=1)
    max_new_tokens: int = setting(64, "token limit of one answer (of one turn)", low=1, high=2**31 - 1)
    min_new_tokens: int = setting(
        0,
        "so many first tokens of an answer end nothing: end-of-sequence and stop ids have probability 0",
        low=0,
    )
    temperature: float = setting(1.0, "divides the logits before sampling", above=0.0, hint=_GREEDY)
    top_p: float = setting(
        1.0, "smallest set of tokens with this probability; 1 keeps all", above=0.0, high=1.0
    )
    top_k: int = setting(0, "only the k most probable tokens; 0 keeps all", low=0)
    stop: tuple[str, ...] = setting((), "texts that end an answer, besides the end-of-sequence token")
    stop_token_ids: tuple[int, ...] = setting((), "token ids that end an answer", low=0)
    max_turns: int = setting(
        1, "model turns of one episode; one that has not finished by then is cut off", low=1
    )
    max_prompt_tokens: int | None = setting(
        None, "longer prompts are errors of the task, counted and skipped; null is no limit", low=1
    )
    eval_temperature: float = setting(
        0.0, "temperature of evaluation; 0 is greedy, like explore=False", low=0.0
    )
    eval_samples: int = setting(1, "answers per evaluation prompt (pass@1 is their mean)", low=1)
    max_empty_samples: int = setting(
        3, "iterations in a row without a usable sample after which training stops with an error", low=1
    )
    sample_timeout_s: float | None = setting(
        7200.0,
        "seconds for one sample() of an env runner; others take the problems of one that is ended",
        above=0.0,
    )
    restart_timeout_s: float = setting(
        300.0, "seconds to wait for an env runner when none is left (vLLM takes a minute or two)", above=0.0
    )
    push_timeout_s: float = setting(600.0, "seconds an env runner has to confirm new weights", above=0.0)
    sleep_while_learning: bool = setting(
        False, "engines give their GPU memory back while the learner computes; weights wait in host memory"
    )
    weight_transport: WeightTransport = setting(
        "auto", "how weights reach engines in other processes; the log says what auto chose"
    )


@dataclass(frozen=True)
class GateSettings:
    """Which responses are trained at all: those whose ratio is inside the bounds."""

    kind: Literal["geometric_mask", "product_mask"] = setting("geometric_mask", "ratio of a response")
    lower: float | None = setting(None, "lower bound of the ratio train / rollout", low=0.0)
    upper: float | None = setting(None, "upper bound of the ratio train / rollout", above=0.0)


@dataclass(frozen=True)
class CorrectionSettings:
    """An importance correction (docs/algorithms.md); bounds are of the ratio, not of its logarithm."""

    kind: CorrectionKind = setting("none", "which correction")
    lower: float | None = setting(None, "lower bound of the ratio train / rollout", low=0.0)
    upper: float | None = setting(None, "upper bound of the ratio train / rollout", above=0.0)
    veto: float | None = setting(None, "drop a response that has a token with a ratio below this", low=0.0)
    gate: GateSettings | None = setting(None, "also drop responses outside the bounds of a gate of its own")
    divisor: Literal["all", "kept"] = setting(
        "all", "what a loss is divided by: all trained tokens, or those that keep a weight (as verl)"
    )


@dataclass(frozen=True)
class TrainSettings:
    """`.training(...)`"""

    lr: float | tuple[tuple[float, float], ...] = setting(
        1e-6, "learning rate, or a schedule of pairs [completions sampled, learning rate]", low=0.0
    )
    num_epochs: int = setting(1, "passes over the samples of an iteration", low=1)
    grad_clip: float | None = setting(
        1.0, "largest global L2 norm of a gradient; null does not clip", above=0.0
    )
    loss: str = setting("grpo", "policy loss", choices="grpo | dr_grpo | dapo | gspo | rloo | reinforce++")
    loss_config: dict = setting({}, "further keyword arguments of that loss")
    advantages: str | None = setting(
        None,
        "kind of advantages; null takes the loss's own",
        choices="grpo | grpo_batch | dr_grpo | rloo | reinforce++ | reinforce++_baseline | null",
    )
    scale_rewards: Literal["group", "batch", "none"] | None = setting(
        None, "TRL's choice: what reward minus group mean is divided by; null leaves it to advantages"
    )
    clip_low: float | None = setting(
        None, "the ratio is clipped to [1 - clip_low, 1 + clip_high]; null takes the loss's own"
    )
    clip_high: float | None = setting(None, "see clip_low")
    kl_coeff: float = setting(
        0.0, "weight of the KL to the frozen reference; 0 builds no reference model", low=0.0
    )
    kl_estimator: Literal["k1", "k2", "k3"] = setting(
        "k3", "k1 regularises only as reward: as loss its expected gradient is zero"
    )
    kl_in: Literal["loss", "reward"] = setting(
        "loss", "reward: each token's advantage loses kl_coeff times the KL from it to the end of the answer"
    )
    entropy_coeff: float = setting(0.0, "weight of the entropy bonus")
    minibatches_per_epoch: int = setting(1, "optimiser steps per pass over the samples", low=1)
    micro_batch_tokens: int = setting(
        8192, "tokens of one forward/backward pass; changes memory and speed, not the update", low=1
    )
    weight_decay: float = setting(0.0, "of AdamW", low=0.0)
    betas: tuple[float, float] = setting(
        (0.9, 0.99),
        "of AdamW; 0.99 remembers 100 steps, as runs have hundreds; TRL and verl take 0.999",
        low=0.0,
        below=1.0,
    )
    eps: float = setting(1e-8, "of AdamW", low=0.0)
    warmup_steps: int = setting(
        0, "optimiser steps over which the learning rate rises linearly from lr/warmup_steps to lr", low=0
    )
    lr_decay: Literal["constant", "linear", "cosine"] = setting(
        "constant", "how the learning rate falls after the warm-up"
    )
    total_steps: int | None = setting(None, "optimiser steps at which lr_decay reaches zero", low=1)
    dynamic_sampling: bool = setting(
        False, "sample on until prompts_per_iteration groups have rewards that differ (DAPO)"
    )
    max_sample_rounds: int = setting(4, "rounds that dynamic sampling may take in one iteration", low=1)
    overlong_buffer: int = setting(
        0,
        "DAPO's soft overlong punishment: tokens before max_new_tokens over which it grows; 0 is off",
        low=0,
    )
    overlong_penalty: float = setting(1.0, "the punishment at max_new_tokens", low=0.0)
    correction: CorrectionSettings | None = setting(
        None, "replaces the policy's correction, e.g. {kind: none}; null keeps the policy's"
    )


@dataclass(frozen=True)
class EnvSettings:
    """Which task is trained on: `.environment(name, env_config=...)`"""

    name: str = setting("reasoning_gym", "a name from rllib-llm envs list, or package.module:ClassName")
    config: dict = setting({}, "passed to the environment; rllib-llm envs list names them")
    step_timeout_s: float | None = setting(
        60.0, "seconds for one call of the environment; a hang costs the episode; null waits", above=0.0
    )


@dataclass(frozen=True)
class EvaluationSettings:
    """Greedy (or sampled) answers on held-out prompts while training goes on: `.evaluation(...)`"""

    interval: int | None = setting(None, "iterations between evaluations; null never evaluates", low=1)
    prompts: int = setting(64, "held-out prompts of one evaluation", low=1)
    num_env_runners: int = setting(
        1, "actors that evaluate, each with its own engine; 0: the training engines evaluate", low=0
    )


@dataclass(frozen=True)
class ResourceSettings:
    """What the trial asks Ray for: `.env_runners(...)`, `.learners(...)`, `.resources(...)`"""

    num_env_runners: int = setting(1, "actors that sample; 0 samples in the trainer's process", low=0)
    num_learners: int = setting(
        0, "actors that train (data-parallel); 0 trains in the trainer's process", low=0
    )
    cpus_for_trainer: float = setting(
        1.0,
        "CPUs of the trainer's process; torch gets as many threads in every process as it has CPUs",
        low=0,
    )
    cpus_per_env_runner: float = setting(1.0, "CPUs of each env runner", low=0)
    gpus_per_env_runner: float = setting(0.0, "GPUs of each env runner", low=0)
    cpus_per_learner: float = setting(1.0, "CPUs of each learner", low=0)
    gpus_per_learner: float = setting(0.0, "GPUs of each learner", low=0)
    ray_address: str | None = setting(None, "cluster to join; null starts Ray on this machine")
    ray_cpus: int | None = setting(
        None,
        "CPUs that a locally started Ray declares; null: the machine's, or as many as needed up to four per core",
        low=1,
    )


@dataclass(frozen=True)
class RunSettings:
    """How long, from which seed, and what is kept."""

    iterations: int = setting(100, "training iterations", low=1)
    seed: int = setting(0, "of prompts, sampling and environments", low=0, high=2**32 - 1)
    stop: dict[str, float] = setting(
        {}, "also stop when a metric reaches a value: {env_runners/episode_return_mean: 0.95}"
    )
    max_minutes: float | None = setting(None, "also stop after this much training time", above=0.0)
    checkpoint_every: int = setting(10, "iterations; the last one is always kept; 0: only that", low=0)
    keep_checkpoints: int = setting(2, "newest checkpoints that stay", low=1)
    max_failures: int = setting(
        0, "restarts of the trial from its last checkpoint after an error; -1: without limit", low=-1
    )
    directory: str = setting("results", "where experiment directories are made")
    compile_ahead: bool = setting(
        True, "on a GPU of this machine, compile the matrix products that the run will meet before it starts"
    )
    resources: ResourceSettings = field(default_factory=ResourceSettings)


@dataclass(frozen=True)
class TrackingSettings:
    """The MLflow store."""

    enabled: bool = setting(True, "write to MLflow")
    uri: str | None = setting(None, "the store; null takes MLFLOW_TRACKING_URI, else sqlite:///mlflow.db")
    experiment: str = setting("rllib_llm", "MLflow's experiment")
    tags: dict[str, str] = setting({}, "tags of the run")
    samples_every: int = setting(10, "iterations between two tables of sampled answers; 0 keeps none", low=0)
    detail: bool = setting(
        False, "also write every bin of the mismatch as a metric; else a table of the run has them"
    )


GROUPS: dict[str, type] = {
    "precision": PrecisionSettings,
    "model": ModelSettings,
    "rollout": RolloutSettings,
    "train": TrainSettings,
}
"""Sections that `GRPOConfig` holds as plain dicts; the other sections are attributes of RLlib's (`settings.names`)."""

SECTIONS: dict[str, type] = {
    "precision": PrecisionSettings,
    "model": ModelSettings,
    "rollout": RolloutSettings,
    "env": EnvSettings,
    "train": TrainSettings,
    "evaluation": EvaluationSettings,
    "run": RunSettings,
    "tracking": TrackingSettings,
}
"""All sections, in the order of a file."""


@dataclass(frozen=True)
class Settings:
    """The four groups of a valid config, typed, with the loaded policy."""

    precision: PrecisionSettings
    model: ModelSettings
    rollout: RolloutSettings
    train: TrainSettings
    policy: PrecisionPolicy

"""Names of every metric that training reports. Constants, so that a typo is an ImportError and docs can be compared.

A result key is these names joined by "/": `env_runners/episode_return_mean`, `learners/default_policy/loss`.
Names that RLlib itself defines (episode_return_mean, num_episodes, timers) keep RLlib's spelling.
"""

from __future__ import annotations

# Groups (first part of a result key). env_runners, learners, evaluation and timers are RLlib's own.
ENV_RUNNERS = "env_runners"
LEARNERS = "learners"
EVALUATION = "evaluation"
EVALUATION_AT_START = "evaluation_at_start"  # the evaluation before the first update, in the first result
TIMERS = "timers"
MISMATCH = "mismatch"  # train against rollout log-prob, same weights; names: rllib_llm/mismatch/registry.py
PRECISION = "precision"
CORRECTION = "correction"  # importance weights of the correction that was applied

# env_runners/…: one value per iteration, averaged or summed over the runners
EPISODE_RETURN_MEAN = "episode_return_mean"  # mean summed reward of an episode
EPISODE_RETURN_MAX = "episode_return_max"
EPISODE_RETURN_MIN = "episode_return_min"
SOLVED_SHARE = "solved_share"  # share of episodes that their environment says are solved
RESPONSE_LENGTH_MEAN = "response_length_mean"  # tokens the model wrote in an episode
PROMPT_LENGTH_MEAN = "prompt_length_mean"
NUM_TURNS_MEAN = "num_turns_mean"
TRUNCATED_SHARE = "truncated_share"  # episodes whose last answer ended by length
TOKENS_PER_S = "tokens_per_s"  # sampled tokens / seconds inside engine.generate, per runner
NUM_TOKENS_SAMPLED = "num_tokens_sampled"
NUM_UNKNOWN_TOKENS = (
    "num_unknown_tokens"  # sampled ids that the tokenizer has no text for; decoded to nothing
)
NUM_REWARD_ERRORS = "num_reward_errors"  # episodes lost to an exception in the environment
NUM_REWARD_ERRORS_LIFETIME = "num_reward_errors_lifetime"
REWARDS = "rewards"  # env_runners/rewards/<name>: mean of each named reward part

# Top level counters written by the Algorithm
NUM_GROUPS_WITHOUT_SIGNAL = "num_groups_without_signal"  # all advantages of the group are 0: rewards equal
NUM_SAMPLES_REFUSED = "num_samples_refused"  # sampled with weights other than the pushed ones
NUM_PROMPTS_LOST = "num_prompts_lost"  # prompts no healthy runner could answer
NUM_EMPTY_SAMPLES = "num_consecutive_empty_samples"
NUM_SAMPLE_ROUNDS = "num_sample_rounds"
OVERLONG_PENALTY_MEAN = (
    "overlong_penalty_mean"  # <= 0, only with overlong_buffer; episode returns are without it
)

# learners/default_policy/…
LOSS = "loss"
GRAD_NORM = "grad_norm"  # global L2 norm before clipping
ENTROPY = "entropy"
CLIP_FRACTION = "clip_fraction"
CLIP_LOW = "clip_low"  # the calibrated range, only with policy.clip_calibration
CLIP_HIGH = "clip_high"
KL_REFERENCE = "kl_reference"
LEARNING_RATE = "lr"
NUM_TOKENS = "num_tokens"  # trained tokens of the iteration, all learners
NUM_OPTIMIZER_STEPS = "num_optimizer_steps_lifetime"
NUM_SKIPPED_STEPS = "num_skipped_steps"  # optimiser steps not taken because a gradient was not finite
NUM_SKIPPED_STEPS_LIFETIME = "num_skipped_steps_lifetime"
NUM_MICRO_BATCHES = "num_micro_batches"
LOSS_SCALE = "loss_scale"

# timers/… (seconds)
SAMPLE_TIMER = "sample"
ADVANTAGE_TIMER = "advantages"
LEARN_TIMER = "learn"
PUSH_WEIGHTS_TIMER = "push_weights"
MISMATCH_TIMER = "mismatch"

# throughput/…: tokens of the iteration / seconds of the phase, the whole algorithm (timers/… has the seconds)
THROUGHPUT = "throughput"
SAMPLE_TOKENS_PER_S = "sample_tokens_per_s"  # sampled tokens / timers/sample, environment included
LEARN_TOKENS_PER_S = "learn_tokens_per_s"  # trained tokens / timers/learn
ITERATION_TOKENS_PER_S = "iteration_tokens_per_s"  # sampled tokens / all phases

# memory/<side>_<what>: GiB, the largest peak of any process of that side since it began
MEMORY = "memory"
LEARNER = "learner"
ENGINE = "engine"  # with num_env_runners = 0 the learner's process
RSS_PEAK = "rss_peak_gib"  # resident main memory
CUDA_PEAK = "cuda_peak_gib"  # torch.cuda.max_memory_allocated, the GPU with most; absent without a GPU in use

# precision/…
WEIGHTS_VERSION = "weights_version"
CORRECTION_ACTIVE = "correction_active"  # 1 when the loss uses correction weights
GUARD_VIOLATIONS = "guard_violations"  # consecutive iterations outside the policy's tolerance

"""`LLMEnvRunner`: RLlib's EnvRunner for text. Holds one engine and plays episodes with it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium as gym
import ray
import torch
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.core import COMPONENT_RL_MODULE, DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.utils import force_list
from ray.rllib.utils.annotations import override
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics import (
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
)

from rllib_llm import metric_names as names
from rllib_llm.engines import SamplingParams, make_engine
from rllib_llm.engines.stopping import end_ids
from rllib_llm.envs import make_env
from rllib_llm.envs.calls import EnvCaller
from rllib_llm.models.checkpoint import load_config, load_tokenizer
from rllib_llm.models.paths import resolve_model_path
from rllib_llm.process.attest import prepare_process
from rllib_llm.rollout.episode import TextEpisode
from rllib_llm.rollout.play import Conversation, RolloutStats, play, seed_of
from rllib_llm.rollout.prompting import PromptEncoder
from rllib_llm.sync.packed import WeightUpdate
from rllib_llm.sync.receiver import Incoming
from rllib_llm.sync.stream import StreamOffer
from rllib_llm.sync.topology import Place
from rllib_llm.sync.verify import WeightReceipt

__all__ = ["LLMEnvRunner", "Reply"]

logger = logging.getLogger(__name__)
_ENV_STATE = "text_env"


@dataclass(frozen=True)
class Reply:
    """Result of a call to a runner, or the traceback of why there is none.

    RLlib ends an actor whose method raises and logs the error on that actor's node only. Errors that the
    driver must show, or decide upon, travel as values.
    """

    worker_index: int
    value: Any = None
    error: str | None = None
    lost_sample: str | None = None
    """why the environment cost the call a sample, the last one"""


class LLMEnvRunner(EnvRunner, Checkpointable):
    """Samples groups of completions and has an environment judge them.

    Which problems are sampled is the Algorithm's choice (`prompt_indices`), and every random draw has a seed
    made from (config seed, split, problem index, sample, turn): samples do not depend on the number of
    runners. Weights come only through `apply_weights`; RLlib's state messages carry none.
    """

    module = None  # RLlib's Algorithm.get_module() reads it; an engine is not an RLModule

    def __init__(self, *, config: Any, **kwargs: Any):
        super().__init__(config=config, **kwargs)
        self.worker_index: int = kwargs.get("worker_index") or 0
        self.construction_error: str | None = None
        self._callbacks = [cls() for cls in force_list(self.config.callbacks_class)]
        self._next_index = 0
        self._lost_sample: str | None = None
        try:
            self.settings = self.config.settings()
            self._call_env = EnvCaller(self.config.env_step_timeout_s)
            self.make_env()
            self.make_module()
        except Exception:
            if self.worker_index == 0:
                raise
            # A raising actor constructor reaches the driver as "IndexError: list index out of range".
            self.construction_error = traceback.format_exc()

    @override(EnvRunner)
    def make_env(self) -> None:
        """Builds the factories of the training and the evaluation split."""
        env, config, seed = self.config.env, self.config.env_config, self.config.seed or 0
        self.factories = {
            split: make_env(env, dict(config), split=split, seed=seed) for split in ("train", "eval")
        }
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.factories["eval" if self.config.in_evaluation else "train"],
                "env_context": config,
            },
        )

    @override(EnvRunner)
    def make_module(self) -> None:
        """Builds the engine, without weights: the first push brings them."""
        llm, rollout = self.settings.model, self.settings.rollout
        device = torch.device(rollout.engine_options.get("device", "cpu")).type
        # Libraries read these variables at their first computation, so before the engine is built.
        prepare_process(self.settings.policy, rollout.engine, "cuda" if rollout.engine == "vllm" else device)
        path = resolve_model_path(llm.path)
        options = {"load_weights": False, "max_model_len": llm.max_sequence_length} | rollout.engine_options
        if llm.adapter is not None:
            options["adapter"] = llm.adapter.spec()
        if rollout.engine == "vllm" and rollout.sleep_while_learning:
            options["sleep_mode"] = True
        self.engine = make_engine(rollout.engine, str(path), self.settings.policy, **options)
        self.encoder = PromptEncoder(load_tokenizer(path), end_ids(rollout, load_config(path), path))

    @override(EnvRunner)
    def assert_healthy(self) -> None:
        """Nothing to assert: RLlib would end the actor and hide why. Every `Reply` carries `construction_error`."""

    @override(EnvRunner)
    def get_spaces(self) -> dict[str, tuple[gym.Space, gym.Space]]:
        """Nominal spaces (RLlib builds no module without any): text in, text out."""
        spaces = (gym.spaces.Text(2**20), gym.spaces.Text(2**20))
        return {INPUT_ENV_SPACES: spaces, INPUT_ENV_SINGLE_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    # ---------------------------------------------------------------- sampling

    @override(EnvRunner)
    def sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool | None = None,
        random_actions: bool = False,
        force_reset: bool = False,
        prompt_indices: Sequence[int] | None = None,
        evaluation: bool | None = None,
        **kwargs: Any,
    ) -> list[TextEpisode]:
        """Plays the given problems, or the next ones of this runner until `num_episodes` episodes are planned.

        explore=False is greedy. evaluation takes problems of the evaluation split, `eval_samples` answers each.
        Episodes are whole conversations, so `force_reset` has nothing to reset.
        """
        if random_actions:
            raise ValueError("LLMEnvRunner.sample(random_actions=True): random token ids are not text.")
        evaluation = self.config.in_evaluation if evaluation is None else evaluation
        params = self._params(evaluation, explore)
        if prompt_indices is None:
            prompt_indices = self._next_problems(num_episodes or num_timesteps, params.n)
        split = "eval" if evaluation else "train"
        episodes, stats = play(
            self.engine,
            self.encoder,
            self.factories[split],
            list(prompt_indices),
            params,
            max_turns=self.settings.rollout.max_turns,
            max_context=self.engine.max_model_len,
            max_prompt_tokens=self.settings.rollout.max_prompt_tokens,
            seed=partial(seed_of, self.config.seed or 0, split),
            on_event=self._on_event,
            call_env=self._call_env,
            where=f"env runner {self.worker_index}",
        )
        self._lost_sample = stats.last_error
        self._make_callback("on_sample_end", samples=episodes)
        self._log(episodes, stats)
        return episodes

    def _next_problems(self, episodes: int | None, per_problem: int) -> range:
        """Indices for at least so many episodes, for those of an iteration without a number."""
        problems = -(-episodes // per_problem) if episodes else self.settings.rollout.prompts_per_iteration
        start, self._next_index = self._next_index, self._next_index + problems
        return range(start, self._next_index)

    def _params(self, evaluation: bool, explore: bool | None) -> SamplingParams:
        rollout = self.settings.rollout
        explore = self.config.explore if explore is None else explore
        temperature = rollout.eval_temperature if evaluation else rollout.temperature
        greedy = not explore or temperature == 0.0
        return SamplingParams(
            n=rollout.eval_samples if evaluation else rollout.group_size,
            temperature=0.0 if greedy else temperature,
            top_p=1.0 if greedy else rollout.top_p,
            top_k=0 if greedy else rollout.top_k,
            max_tokens=rollout.max_new_tokens,
            min_tokens=rollout.min_new_tokens,
            stop=rollout.stop,
            stop_token_ids=rollout.stop_token_ids,
        )

    def sample_reply(self, prompt_indices: Sequence[int], evaluation: bool = False) -> Reply:
        """`sample` and `get_metrics` for the driver: a `Reply` with (episodes, metrics), never an exception."""
        reply = self._reply(
            lambda: (self.sample(prompt_indices=prompt_indices, evaluation=evaluation), self.get_metrics())
        )
        return reply if reply.error is not None else replace(reply, lost_sample=self._lost_sample)

    def _reply(self, call: Any) -> Reply:
        try:
            if self.construction_error is not None:
                return Reply(self.worker_index, error=self.construction_error)
            return Reply(self.worker_index, value=call())
        except Exception:
            logger.exception("env runner %d", self.worker_index)
            return Reply(self.worker_index, error=traceback.format_exc())

    # ---------------------------------------------------------------- weights

    def apply_weights(self, update: WeightUpdate | Incoming | StreamOffer) -> Reply:
        """Has the engine verify and load an update; the reply's value is its `WeightReceipt`."""

        def call() -> WeightReceipt:
            return self.engine.update_weights(update)

        return self._reply(call)

    def place_reply(self) -> Reply:
        """The engine's `Place`, by which a transport is chosen; of a new engine, if the old one has died."""
        return self._reply(self._place)

    def _place(self) -> Place:
        if not self.engine.alive():
            logger.error("env runner %d: its engine has died, a new one is started", self.worker_index)
            self.engine.close()
            self.make_module()
        return self.engine.place

    def holds_base_reply(self, base: str) -> Reply:
        """Whether the engine can be sent adapters alone; see `RolloutEngine.holds_base`."""
        return self._reply(lambda: self.engine.holds_base(base))

    def sleep_reply(self) -> Reply:
        """Has the engine give its GPU memory back until `wake_reply`; one that has died holds none."""
        return self._reply(lambda: self.engine.sleep(1) if self.engine.alive() else None)

    def wake_reply(self) -> Reply:
        return self._reply(lambda: self.engine.wake() if self.engine.alive() else None)

    def attest_reply(self) -> Reply:
        """The engine's `Attestation`."""
        return self._reply(lambda: self.engine.attest())

    # ---------------------------------------------------------------- callbacks and metrics

    def _on_event(self, event: str, conversation: Conversation) -> None:
        """ "created", "start" and "step" show the `Conversation`, "end" the finished `TextEpisode`."""
        episode = conversation.episode if event == "end" else conversation
        index = conversation.sample_index
        self._make_callback(
            f"on_episode_{event}", episode=episode, env=conversation.env, rl_module=None, env_index=index
        )

    def _make_callback(self, name: str, **kwargs: Any) -> None:
        make_callback(
            name,
            callbacks_objects=self._callbacks,
            callbacks_functions=getattr(self.config, f"callbacks_{name}"),
            kwargs={"env_runner": self, "metrics_logger": self.metrics, **kwargs},
        )

    def _log(self, episodes: list[TextEpisode], stats: RolloutStats) -> None:
        m, n = self.metrics, len(episodes)
        counts: dict[Any, float] = {
            NUM_ENV_STEPS_SAMPLED: n,
            NUM_EPISODES: n,
            (NUM_AGENT_STEPS_SAMPLED, DEFAULT_AGENT_ID): n,
            names.NUM_TOKENS_SAMPLED: stats.tokens,
            names.NUM_REWARD_ERRORS: stats.errors,
            names.NUM_UNKNOWN_TOKENS: stats.unknown_tokens,
        }
        lifetime: dict[Any, float] = {
            NUM_ENV_STEPS_SAMPLED_LIFETIME: n,
            (NUM_AGENT_STEPS_SAMPLED_LIFETIME, DEFAULT_AGENT_ID): n,
            NUM_EPISODES_LIFETIME: n,
            names.NUM_REWARD_ERRORS_LIFETIME: stats.errors,
        }
        for key, value in counts.items():
            m.log_value(key, value, reduce="sum")
        for key, value in lifetime.items():
            m.log_value(key, value, reduce="lifetime_sum")
        for e in episodes:
            for name, value in e.metrics().items():
                m.log_value(name, value, reduce="mean")
            for name, value in e.rewards.items():
                m.log_value((names.REWARDS, name), value, reduce="mean")
        if episodes:
            returns = [e.reward for e in episodes]
            m.log_value(names.EPISODE_RETURN_MAX, max(returns), reduce="max")
            m.log_value(names.EPISODE_RETURN_MIN, min(returns), reduce="min")

    @override(EnvRunner)
    def get_metrics(self) -> Any:
        return self.metrics.reduce()  # Stats objects, which the Algorithm aggregates; not numbers

    # ---------------------------------------------------------------- Checkpointable

    @override(Checkpointable)
    def get_state(
        self, components: Any = None, *, not_components: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        state: dict[str, Any] = {NUM_ENV_STEPS_SAMPLED_LIFETIME: self.num_env_steps_sampled_lifetime}
        if self._check_component(_ENV_STATE, components, not_components):
            state[_ENV_STATE] = {
                "next_index": self._next_index,
                "factories": {split: factory.get_state() for split, factory in self.factories.items()},
            }
        return state

    @override(Checkpointable)
    def set_state(self, state: dict[str, Any]) -> None:
        """Takes the environment's state. Weights in a state message are refused: they would bypass the receipt."""
        weights = state.get(COMPONENT_RL_MODULE, {})
        if isinstance(weights, ray.ObjectRef):
            weights = ray.get(weights)
        if weights.get(DEFAULT_MODULE_ID):
            raise ValueError(
                "LLMEnvRunner takes weights through apply_weights(WeightUpdate) only, not through set_state."
            )
        if NUM_ENV_STEPS_SAMPLED_LIFETIME in state:
            self.num_env_steps_sampled_lifetime = state[NUM_ENV_STEPS_SAMPLED_LIFETIME]
        if _ENV_STATE in state:
            self._next_index = state[_ENV_STATE]["next_index"]
            for split, saved in state[_ENV_STATE]["factories"].items():
                self.factories[split].set_state(saved)

    def get_state_reply(self) -> Reply:
        return self._reply(self.get_state)

    def set_state_reply(self, state: dict[str, Any]) -> Reply:
        return self._reply(lambda: self.set_state(state))

    @override(Checkpointable)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (), {"config": self.config, "worker_index": self.worker_index}

    @override(EnvRunner)
    def stop(self) -> None:
        if engine := getattr(self, "engine", None):
            engine.close()

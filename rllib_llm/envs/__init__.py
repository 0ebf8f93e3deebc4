"""Text environments: what the model is asked and how an answer is judged. Imports neither torch nor ray."""

from rllib_llm.envs.calculator import CalculatorFactory
from rllib_llm.envs.jsonl_math import JsonlMath
from rllib_llm.envs.protocol import (
    EnvConfigError,
    Prompt,
    RewardError,
    StepResult,
    TextEnv,
    TextEnvFactory,
)
from rllib_llm.envs.reasoning_gym_env import ReasoningGymTasks
from rllib_llm.envs.registry import make_env, register_text_env, registered_envs, resolve_env
from rllib_llm.envs.retry import RetryFactory
from rllib_llm.envs.rewards import RewardInput

register_text_env("calculator", CalculatorFactory)
register_text_env("jsonl_math", JsonlMath)
register_text_env("reasoning_gym", ReasoningGymTasks)
register_text_env("retry", RetryFactory)

__all__ = [
    "EnvConfigError",
    "Prompt",
    "RewardError",
    "RewardInput",
    "StepResult",
    "TextEnv",
    "TextEnvFactory",
    "make_env",
    "register_text_env",
    "registered_envs",
    "resolve_env",
]

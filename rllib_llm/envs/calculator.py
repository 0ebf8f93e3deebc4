"""A calculator the model can call: the tool-use example, usable around any env."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rllib_llm.envs.checks import Section
from rllib_llm.envs.protocol import Prompt, Split, StepResult, TextEnv

_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_CHARS = 200  # of an expression: bounds the work of exact arithmetic without powers


def calculate(expression: str) -> str:
    """Exact value of + - * / and parentheses over decimal numbers, or "error". Never executes anything else."""
    if len(expression) > MAX_CHARS:
        return "error"
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return "error"
    return str(value)


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        return -_value(node.operand) if isinstance(node.op, ast.USub) else _value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"not arithmetic: {type(node).__name__}")


class CalculatorFactory:
    """Lets the model call a calculator before it answers another environment's problem (multi-turn, tool use).

    A completion that ends with `<calc>3*(4+5)</calc>` gets the observation `<result>27</result>` and another turn;
    any other completion is the answer. env_config: `env` and `env_config` (the environment with the problems);
    `max_calls` (4: after that many, the completion is judged as the answer). Set rollout.max_turns above max_calls.
    """

    def __init__(self, config: Mapping[str, Any], split: Split, seed: int):
        from rllib_llm.envs.registry import make_env

        section = Section(config, "env.config")
        inner = section.take("env", None, (str, type))
        inner_config = section.take("env_config", {}, Mapping)
        self.max_calls: int = section.take("max_calls", 4, int, lambda v: v >= 1, "an integer >= 1")
        if inner is None:
            section.problem("env", "is missing: the environment with the problems, e.g. reasoning_gym")
        else:
            self.inner = section.include("env", lambda: make_env(inner, inner_config, split, seed))
        section.finish()

    def __call__(self) -> CalculatorEnv:
        return CalculatorEnv(self.inner(), self.max_calls)

    def get_state(self) -> dict[str, Any]:
        return self.inner.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self.inner.set_state(state)

    @property
    def num_problems(self) -> int | None:
        return self.inner.num_problems


class CalculatorEnv:
    """One problem, up to `max_calls` calculations, one answer."""

    _CALL = re.compile(r"<calc>([^<]*)</calc>\s*$")

    def __init__(self, inner: TextEnv, max_calls: int):
        self.inner, self.max_calls = inner, max_calls
        self._calls = 0

    def reset(self, index: int) -> Prompt:
        self._calls = 0
        return self.inner.reset(index)

    def step(self, completion: str) -> StepResult:
        """`info["tool_calls"]`: calculations made so far."""
        call = self._CALL.search(completion)
        if call is not None and self._calls < self.max_calls:
            self._calls += 1
            observation = f"<result>{calculate(call.group(1))}</result>"
            return StepResult(0.0, False, observation, {}, {"tool_calls": self._calls})
        result = self.inner.step(completion)
        return StepResult(
            result.reward,
            result.done,
            result.observation,
            result.rewards,
            result.info | {"tool_calls": self._calls},
        )

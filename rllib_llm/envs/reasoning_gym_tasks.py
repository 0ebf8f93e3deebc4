"""Which tasks of reasoning-gym 0.1.25 are safe to score, and how their datasets are made.

A scorer gets what a model wrote. Each of the library's 106 scorers was read and given some sixty hostile strings (see
tests/envs/test_reasoning_gym_tasks.py): those that execute the text, hang on it, raise on it, or accept anything are
refused here with the reason. The list is an allow-list: a task of another library version is refused until it was read.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from rllib_llm.envs.protocol import EnvConfigError

AUDITED_VERSION = "0.1.25"

_EVAL = "its scorer runs eval() on what the model wrote"
_PARSE = "its scorer hands what the model wrote to sympy.parse_expr, which evaluates Python"
_RAISES = "its scorer raises on malformed answers"
_NO_GOLD = "it gives no answer text that its own scorer accepts"

REFUSED: dict[str, str] = {
    "binary_matrix": _EVAL,
    "n_queens": _EVAL,
    "spiral_matrix": _EVAL,
    "string_insertion": _EVAL,
    "countdown": _PARSE,
    "intermediate_integration": _PARSE,
    "polynomial_multiplication": _PARSE,
    "puzzle24": _PARSE,
    "simple_integration": _PARSE,
    "coin_flip": "its scorer expands exponents: '1e999999999' keeps it busy without end",
    "boxnet": _RAISES,
    "calendar_arithmetic": f"{_RAISES} (OverflowError on a number of 400 digits)",
    "game_of_life": f"{_RAISES} (KeyError on a JSON object)",
    "prime_factorization": f"{_RAISES} (ValueError on anything that is not a product)",
    "time_intervals": f"{_RAISES} (OverflowError on a number of 400 digits)",
    "complex_arithmetic": "its scorer gives 1.0 to 'nan'",
    "figlet_font": "its scorer gives 1.0 to a wrong word with ten letters in place",
    "game_of_life_halting": "its scorer gives 1.0 to any text",
    "number_sorting": "its scorer gives 1.0 to numbers that are off by up to 1",
    "graph_color": _NO_GOLD,
    "propositional_logic": _NO_GOLD,
    "rubiks_cube": _NO_GOLD,
    "rush_hour": _NO_GOLD,
    "codeio": "it executes third-party programs to make its problems",
    "knight_swap": "making one problem can take many seconds",
    "composite": "use env.config.tasks with weights: a mixture made here keeps the splits apart",
}

# Tasks that make `size` problems when the dataset is created: their index must stay below that size.
POOLED: dict[str, int] = {
    "acre": 5000,
    "gsm_symbolic": 100_000,
    "list_functions": 100_000,
    "word_ladder": 5000,
}

ALLOWED: frozenset[str] = frozenset(
    """ab acre advanced_geometry aiw arc_1d arc_agi base_conversion basic_arithmetic bf binary_alternation
    bitwise_arithmetic caesar_cipher chain_sum circuit_logic color_cube_rotation count_bits count_primes course_schedule
    cryptarithm decimal_arithmetic decimal_chain_sum dice emoji_mystery family_relationships fraction_simplification
    futoshiki gcd group_anagrams gsm_symbolic isomorphic_strings jugs kakurasu knights_knaves largest_island lcm
    leg_counting letter_counting letter_jumble list_functions mahjong_puzzle manipulate_matrix maze mini_sudoku
    modulo_grid needle_haystack number_filtering number_format number_sequence palindrome_generation
    palindrome_partitioning path_star polynomial_equations pool_matrix power_function products quantum_lock ransom_note
    rearc rectangle_count rotate_matrix rotten_oranges self_reference sentence_reordering shortest_path simple_equations
    simple_geometry sokoban spell_backward string_manipulation string_splitting string_synthesis sudoku survo syllogism
    tower_of_hanoi tsumego word_ladder word_sequence_reversal word_sorting zebra_puzzles""".split()  # noqa: SIM905 - eighty names are easier to read as text
)


def refusal(task: str) -> str | None:
    """Why a task cannot be used, None if it can."""
    if task in ALLOWED:
        return None
    if task in REFUSED:
        return f"refused: {REFUSED[task]}"
    close = difflib.get_close_matches(task, ALLOWED, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"not an audited task of reasoning-gym {AUDITED_VERSION}; {hint}possible: {', '.join(sorted(ALLOWED))}"


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise EnvConfigError(
            f"env reasoning_gym needs the package reasoning-gym ({error}): pip install 'rllib-llm[tasks]'"
        ) from error
    installed = importlib.metadata.version("reasoning-gym")  # its __version__ says 0.1.19 in 0.1.25
    if installed != AUDITED_VERSION:
        raise EnvConfigError(
            f"reasoning-gym {installed} is installed; scorers were audited for {AUDITED_VERSION} only. "
            f"pip install reasoning-gym=={AUDITED_VERSION}"
        )
    return reasoning_gym


def create_levels(task: str) -> Any | None:
    """reasoning-gym's curriculum of a task (its difficulty levels), None if it has none."""
    _library()
    from reasoning_gym.factory import CURRICULA

    return CURRICULA[task]() if task in CURRICULA else None


def last_valid_level(task: str, config: Mapping[str, Any]) -> int | None:
    """Highest level up to which every level gives options the task itself accepts; None without a curriculum.

    Some curricula end in levels that their own task refuses (caesar_cipher: rotations up to 50 of 26 letters).
    """
    levels = create_levels(task)
    if levels is None:
        return None
    from reasoning_gym.factory import DATASETS

    last = -1
    for level in range(max(len(attribute.levels) for attribute in levels.attributes.values())):
        try:
            made = DATASETS[task][1](**(dict(config) | _level_options(task, level)))
            if hasattr(made, "validate"):
                made.validate()
        except (AssertionError, TypeError, ValueError):
            break
        last = level
    return last


def create_dataset(task: str, config: Mapping[str, Any], level: int | None) -> Any:
    """Dataset of an allowed task; with a level, its difficulty options come from the curriculum instead of `config`.

    Raises `EnvConfigError` listing every unknown option, or with the library's own complaint.
    """
    reason = refusal(task)
    if reason is not None:
        raise EnvConfigError(f"task {task!r}: {reason}")
    library = _library()
    from reasoning_gym.factory import DATASETS

    known = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"seed", "size"}
    problems = []
    for key in config:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            options = ", ".join(sorted(known))
            problems.append(
                f"env.config.task_config.{key} is not an option of {task!r}; {hint}options: {options}"
            )
    if problems:
        raise EnvConfigError("\n".join(problems))
    try:
        difficulty = {} if level is None else _level_options(task, level)
        return library.create_dataset(task, **(dict(config) | difficulty), seed=0, size=POOLED.get(task, 1))
    except (AssertionError, TypeError, ValueError) as error:
        raise EnvConfigError(
            f"env.config.task_config of {task!r} = {dict(config)}: {type(error).__name__}: {error}"
        ) from error


def _level_options(task: str, level: int) -> dict[str, Any]:
    """The difficulty options reasoning-gym's curriculum gives at a level: from its easiest up to this one."""
    levels: Any = create_levels(task)
    levels.set_global_level(level)
    made = levels.generate_configuration({})
    names: list[str] = []
    for attribute in levels.attributes.values():
        for key in ("field_name", "lower_field_name", "upper_field_name"):
            if hasattr(attribute, key):
                names.append(getattr(attribute, key))
    return {name: getattr(made, name) for name in names}

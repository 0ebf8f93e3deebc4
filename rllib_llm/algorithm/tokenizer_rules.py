"""What a model directory's tokenizer must agree on with its config, its chat template and the task, before training.

Each of these disagreements trains without an error and learns nothing: answers never end, prompts are over before the
answer begins, or the reward never sees what the model wrote.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllib_llm.engines.stopping import end_ids
from rllib_llm.envs import Prompt
from rllib_llm.models.checkpoint import GENERATION_FILE, load_config, load_tokenizer
from rllib_llm.models.safetensor_files import ModelFilesError
from rllib_llm.rollout.prompting import PromptEncoder
from rllib_llm.settings.groups import RolloutSettings

__all__ = ["TokenizerError", "check_tokenizer"]

logger = logging.getLogger(__name__)
_ADD_THEM = f"add it to eos_token_id in {GENERATION_FILE}, or to rollout.stop_token_ids"


class TokenizerError(ModelFilesError):
    """A tokenizer that does not go with its model's config, its chat template or the task; lists every problem."""


@functools.cache
def _warn_once(message: str) -> None:
    logger.warning(message)


@dataclass(frozen=True)
class _Subject:
    """What is judged: the tokenizer of `path`, the ids that end an answer, and who chose them."""

    path: Path
    encoder: PromptEncoder
    ends: frozenset[int]
    vocabulary: int
    rollout: RolloutSettings
    prompt: Prompt | None

    @property
    def tokenizer(self) -> Any:
        return self.encoder.tokenizer

    @property
    def closing(self) -> frozenset[int]:
        """Ends that no open text ends with: not a stop id that is plain text, such as a line break."""
        return self.ends - (frozenset(self.rollout.stop_token_ids) - self.encoder.special_ids)

    @property
    def chosen(self) -> bool:
        """Whether the user says in the configuration what ends an answer."""
        given = self.rollout.engine_options.get("eos_token_id")
        return bool(self.rollout.stop or self.rollout.stop_token_ids or given is not None)

    def named(self, token: int) -> str:
        return f"{self.tokenizer.convert_ids_to_tokens(int(token))!r} (id {token})"


def check_tokenizer(path: Path, rollout: RolloutSettings, prompt: Prompt | None, factory: Any) -> None:
    """Compare the tokenizer of a model directory with everything that it meets in a run.

    Args:
        prompt: of the first problem; None if the environment gave none.
        factory: the environment's; its `extract`, where it has one, says which texts the reward looks for.

    Raises:
        TokenizerError: lists all problems, with file and key. What may be meant so is logged as a warning, once.
        ModelPathError: a file of the tokenizer, or generation_config.json, is damaged.
    """
    config = load_config(path)
    try:
        ends = frozenset(end_ids(rollout, config, path))
    except ValueError as error:
        raise TokenizerError(f"rollout.engine_options: {error}") from error
    encoder = PromptEncoder(load_tokenizer(path), ends)
    subject = _Subject(path, encoder, ends, config.vocab_size, rollout, prompt)
    if nameless := encoder.unknown(range(config.vocab_size)):
        _warn_once(
            f"{path}: config.json says vocab_size = {config.vocab_size}, tokenizer.json has no text for {nameless} of "
            "these ids. They can be sampled, decode to nothing, and are counted in env_runners/num_unknown_tokens; a "
            "trained model rarely writes one"
        )
    problems = [*_ends(subject), *_closing_token(subject), *_prompt(subject), *_texts(subject, factory)]
    if problems:
        raise TokenizerError(
            f"{path}: the tokenizer does not go with the model or the task, {len(problems)} problem(s):\n"
            + "\n".join(f"  - {p}" for p in problems)
        )


def _ends(s: _Subject) -> Iterator[str]:
    """Something must end an answer, and what the tokenizer calls its end should."""
    own = s.tokenizer.eos_token_id
    if own is not None and own in s.ends:
        return
    where = f"tokenizer_config.json: eos_token is {s.named(own)}" if own is not None else ""
    if not s.ends and not s.rollout.stop:
        yield (
            f"no end of sequence is known: neither {GENERATION_FILE} nor config.json names an eos_token_id, so every "
            f"answer would end by length{'; ' + where if where else ''}: name it in {GENERATION_FILE}, or set "
            "rollout.stop_token_ids or rollout.stop"
        )
    elif own is not None:
        problem = (
            f"{where}, which is not among the ids that end an answer {sorted(s.ends)} (eos_token_id of "
            f"{GENERATION_FILE} or config.json): answers would go on behind it; {_ADD_THEM}"
        )
        if not s.chosen:
            yield problem
        else:
            _warn_once(f"{s.path}: {problem}")


def _closing_token(s: _Subject) -> Iterator[str]:
    """The token that the chat template puts behind an answer should end one."""
    chat = s.prompt is not None and s.prompt.messages is not None
    if not getattr(s.tokenizer, "chat_template", None):
        return
    try:
        token = s.encoder.closing_token()
    except Exception as error:  # jinja2's, and what a template raises by itself
        if chat:
            yield f"chat_template.jinja (or chat_template of tokenizer_config.json) cannot be rendered: {error}"
        return
    if token is None or token in s.ends:
        return
    problem = (
        f"the chat template (chat_template.jinja or tokenizer_config.json) closes an answer with {s.named(token)}, "
        f"which is not among the ids that end one {sorted(s.ends)}; {_ADD_THEM}"
    )
    if chat and not s.chosen:
        yield problem
    else:  # a base model is often prompted with text although a template lies beside it
        _warn_once(f"{s.path}: {problem}")


def _prompt(s: _Subject) -> Iterator[str]:
    """The first prompt's ids: in the model's vocabulary, one beginning, no end."""
    if s.prompt is None:
        return
    try:
        ids = s.encoder.encode(s.prompt)
    except Exception as error:  # ours, jinja2's, and what a template raises by itself
        yield f"the first prompt cannot be written in tokens: {error}"
        return
    if max(ids) >= s.vocabulary:
        yield (
            f"the tokenizer writes the first prompt with token id {max(ids)}, config.json says vocab_size = "
            f"{s.vocabulary}: the tokenizer's files are those of another model."
        )
    if appended := _appended(s.tokenizer, s.prompt):
        yield (
            f"tokenizer.json appends {s.named(appended[-1])} to every prompt (post_processor, or add_eos_token in "
            "tokenizer_config.json): a prompt must be open for the answer; remove it there"
        )
    elif ids[-1] in s.closing or ids[-1] == s.tokenizer.eos_token_id:
        source = "the chat template" if s.prompt.messages is not None else "the task (env.config.prompt)"
        yield (
            f"the first prompt ends with {s.named(ids[-1])}, which ends a sequence: it is over before the answer "
            f"begins; {source} writes it, remove it there"
        )
    if len(ids) > 1 and ids[0] == ids[1] and ids[0] in s.encoder.special_ids:
        yield (
            f"the first prompt begins with {s.named(ids[0])} twice: tokenizer.json adds it (post_processor), and the "
            "chat template, the prompt's text or add_bos_token in tokenizer_config.json does too; remove one"
        )


def _appended(tokenizer: Any, prompt: Prompt) -> list[int]:
    """What the tokenizer adds behind a text by itself; chats are encoded without additions."""
    if prompt.text is None:
        return []
    whole = list(tokenizer(prompt.text)["input_ids"])
    plain = list(tokenizer(prompt.text, add_special_tokens=False)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[start + len(plain) :]
    return []


def _texts(s: _Subject, factory: Any) -> Iterator[str]:
    """Texts that the reward or a stop string looks for, written in tokens and read again."""
    extract: Any = getattr(factory, "extract", None)
    kind = getattr(extract, "kind", None)
    if kind in ("tag", "marker", "boxed"):
        pieces = {
            "tag": lambda: (f"<{extract.tag}>", f"</{extract.tag}>"),
            "marker": lambda: (extract.marker,),
            "boxed": lambda: ("\\boxed{", "}"),
        }[kind]()
        back = s.encoder.read_back("5".join((*pieces, "")) if kind == "marker" else "5".join(pieces))
        if lost := [piece for piece in pieces if piece not in back]:
            key = "env.config.answer" + {"tag": ".tag", "marker": ".marker", "boxed": ".kind"}[kind]
            yield (
                f"{key}: the reward looks for {_listed(lost)}, which this tokenizer (tokenizer.json) gives back as "
                f"{back!r}: no answer could ever be found; choose a text that survives, or mend the tokenizer"
            )
    further = {"env.config.answer.until": getattr(extract, "until", "") or ""}
    further |= {f"rollout.stop[{i}]": text for i, text in enumerate(s.rollout.stop)}
    for key, text in further.items():
        if text and text.strip() not in s.encoder.read_back(f"5{text}"):
            _warn_once(
                f"{s.path}: {key} = {text!r} does not survive tokenizer.json: it comes back as "
                f"{s.encoder.read_back(f'5{text}')!r}, so it would never be found in an answer"
            )


def _listed(texts: Sequence[str]) -> str:
    return " and ".join(map(repr, texts))

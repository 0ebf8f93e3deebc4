"""`rllib-llm mismatch …`: find the operator in which learner and rollout part."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllib_llm.cli import table
from rllib_llm.cli.parsing import UsageError, new_parser

if TYPE_CHECKING:
    from rllib_llm.mismatch.localise import Localisation, OperatorComparison
    from rllib_llm.mismatch.workload import Workload

DIFFERS = 3
"""Exit status when the two sides differ."""
_BEFORE, _AFTER, _LAST = 2, 5, 3  # rows of the table around the first difference, and at the end


def add_mismatch_parser(subparsers: Any) -> None:
    """Mounts `mismatch localise` on the main parser."""
    parser = new_parser(
        subparsers,
        "mismatch",
        "find out where learner and rollout compute different numbers",
        '  rllib-llm mismatch localise --model tiny-chain --policy unified-fp8 --prompt "3 + 4 - 5 ="',
    )
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    localise = new_parser(
        actions,
        "localise",
        "run both sides on given prompts, compare after every operator, name the first that differs",
        '  rllib-llm mismatch localise --model tiny-chain --policy unified-fp8 --prompt "3 + 4 - 5 ="\n'
        "  rllib-llm mismatch localise --model DIR --policy my-policy.yaml --prompts prompts.txt --json\n\n"
        "The engine samples answers; its model then computes prompts and answers again (chunked prefill into a KV\n"
        "cache, decode token by token), the learner computes them as one packed forward. Every output of every\n"
        "operator is kept: use a few hundred tokens.\n\n"
        "exit status: 0 all operators equal · 3 some differ · 2 bad input",
    )
    localise.add_argument("--model", required=True, help="model directory, or a shipped model (tiny-chain)")
    localise.add_argument("--policy", required=True, help="shipped policy (policy list) or YAML file")
    localise.add_argument("--engine", default="torch", help="rollout engine (default: torch)")
    localise.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="a prompt, taken literally; repeatable"
    )
    localise.add_argument(
        "--prompts",
        metavar="FILE",
        help='text: one prompt a line; .jsonl: {"prompt": TEXT} or {"token_ids": [...]} a line',
    )
    localise.add_argument(
        "--max-new-tokens", type=_natural, default=16, metavar="N", help="0: prefill only (default: 16)"
    )
    localise.add_argument("--temperature", type=float, default=1.0, metavar="T", help="default: 1")
    localise.add_argument("--seed", type=_natural, default=0, metavar="N", help="of sampling (default: 0)")
    localise.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    localise.add_argument("--all", action="store_true", help="a line for every operator")
    localise.add_argument("--json", action="store_true", help="everything as JSON")
    localise.set_defaults(run=_localise)


def _localise(arguments: argparse.Namespace) -> int:
    from precision_policies import load_policy
    from rllib_llm.engines import PromptError, SamplingParamsError
    from rllib_llm.mismatch.localise import localise
    from rllib_llm.models.architecture import ArchitectureError
    from rllib_llm.models.paths import ModelPathError, resolve_model_path
    from rllib_llm.models.safetensor_files import ModelFilesError

    policy = load_policy(arguments.policy)
    device = _checked_device(arguments)
    try:
        prompts = read_prompts(resolve_model_path(arguments.model), arguments.prompt, arguments.prompts)
        found, workload = localise(
            arguments.model,
            policy,
            prompts,
            engine=arguments.engine,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            device=device,
        )
    except (ModelPathError, ArchitectureError, ModelFilesError, PromptError, SamplingParamsError) as error:
        raise UsageError(str(error)) from error
    context = {
        "model": arguments.model,
        "policy": policy.name,
        "policy_fingerprint": policy.fingerprint,
        "engine": arguments.engine,
        "device": device,
        "prompts": len(prompts),
        "prompt_tokens": sum(len(s.prompt) for s in workload.samples),
        "new_tokens": sum(len(s.answer) for s in workload.samples),
    }
    if arguments.json:
        print(json.dumps(context | found.to_dict(), indent=2, allow_nan=False))
    else:
        print(report(found, workload, context, policy.off_policy_reasons, every=arguments.all))
    return 0 if found.equal else DIFFERS


def _checked_device(arguments: argparse.Namespace) -> str:
    """The device; UsageError where there is no such device or engine here, or the engine cannot be traced."""
    import torch

    from rllib_llm.engines.factory import ENGINES, missing_engine
    from rllib_llm.mismatch.localise import require_traceable

    if arguments.engine not in ENGINES:
        raise UsageError(f"--engine {arguments.engine}: one of {', '.join(ENGINES)}")
    if missing := missing_engine(arguments.engine):
        raise UsageError(missing)
    require_traceable(arguments.engine)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"--device {device}: cpu, or cuda on a machine with a CUDA device")
    return str(device)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def read_prompts(model: Path, texts: Sequence[str], file: str | None) -> list[list[int]]:
    """Token ids of `--prompt` texts, then of the lines of `--prompts`. UsageError lists every bad line."""
    entries: list[Any] = list(texts)
    problems: list[str] = []
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--prompts {file}: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                entry, problem = _entry(line) if file.endswith(".jsonl") else (line, "")
                entries.append(entry)
                problems += [f"line {number}: {problem}"] if problem else []
    if problems:
        raise UsageError(f"--prompts {file}:\n" + "\n".join(f"  - {p}" for p in problems))
    if not entries:
        raise UsageError("no prompt: give --prompt TEXT (repeatable) or --prompts FILE with one a line.")
    return _encoded(model, entries)


def _entry(line: str) -> tuple[Any, str]:
    """(text or token ids, "") or (None, what is wrong) of a JSON line."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        return None, f"not JSON ({error.msg} at character {error.pos})"
    except (ValueError, RecursionError) as error:  # a number of 5 000 digits, 100 000 brackets
        return None, f"not JSON ({error})"
    if isinstance(value, dict) and len(found := value.keys() & {"prompt", "token_ids"}) == 1:
        value = value[found.pop()]
        if isinstance(value, str) or (
            isinstance(value, list) and value and all(type(i) is int and i >= 0 for i in value)
        ):
            return value, ""
    return None, 'must be {"prompt": TEXT} or {"token_ids": [whole numbers]}'


def _encoded(model: Path, entries: Sequence[Any]) -> list[list[int]]:
    if all(isinstance(entry, list) for entry in entries):
        return list(entries)
    from rllib_llm.models import load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{model} has no tokenizer that can be loaded ({error}); give token ids: "
            '--prompts FILE.jsonl with {"token_ids": [...]} lines'
        ) from error
    return [e if isinstance(e, list) else tokenizer(e)["input_ids"] for e in entries]


# ---- report ----------------------------------------------------------------------------------------------------------


def report(
    found: Localisation, workload: Workload, context: dict[str, Any], reasons: Sequence[str], *, every: bool
) -> str:
    """The answer first, then a table of the operators around it."""
    phases = "prefill, then decode" if context["new_tokens"] else "prefill"
    rows = [
        ("model", str(context["model"])),
        ("policy", f"{context['policy']} ({context['policy_fingerprint'][:12]})"),
        ("on-policy by construction", "no: " + "; ".join(reasons) if reasons else "yes"),
        ("rollout", f"{context['engine']} engine on {context['device']}: {phases}"),
        ("learner", f"one packed forward of {workload.starts[-1]} tokens"),
        ("tokens", f"{context['prompt_tokens']} of prompts, {context['new_tokens']} of answers"),
        ("compared", f"{len(found.comparisons)} operator outputs, {_differing(found)} of them differ"),
    ]
    text = [table.pairs(rows), "", _answer(found)]
    if found.one_side_only:
        sites = found.one_side_only
        more = f" and {len(sites) - 3} more (--json)" if len(sites) > 3 else ""
        text.append("computed by one side only, not compared: " + ", ".join(sites[:3]) + more)
    if every or not found.equal:
        text += ["", _operators(found, every)]
    return "\n".join(text)


def _differing(found: Localisation) -> int:
    return sum(not c.equal for c in found.comparisons)


def _answer(found: Localisation) -> str:
    first = found.first
    if first is None:
        return "EQUAL: every operator gives the same bits on both sides, and in a training step."
    operators = (
        first.operator if first.operator == first.rollout_operator
        else f"learner: {first.operator}, rollout: {first.rollout_operator}"
    )  # fmt: skip
    share = 100 * first.differing / first.elements
    lines = [
        f"FIRST DIFFERENCE: {first.name} ({operators})",
        f"  elements  {first.differing} of {first.elements} differ ({share:.3g} %), by up to {first.max_ulps} ulp "
        f"of {first.dtype} (|difference| up to {first.max_abs:.3g})",
        f"  tokens    {first.differing_tokens} of {first.tokens}; first at {first.first}; largest at {first.worst}",
    ]
    return "\n".join([*lines, *(f"  why       {line}" for line in found.evidence)])


def _operators(found: Localisation, every: bool) -> str:
    header = ("", "OPERATOR OUTPUT", "ELEMENTS", "DIFFER", "MAX ULP", "MAX |DIFF|", "FIRST TOKEN")
    total = len(found.comparisons)
    first = next((i for i, c in enumerate(found.comparisons) if not c.equal), total)
    shown = set(range(total)) if every else {
        i for i in range(total) if first - _BEFORE <= i <= first + _AFTER or i >= total - _LAST
    }  # fmt: skip
    rows: list[Sequence[str]] = []
    skipped = 0
    for i, comparison in enumerate(found.comparisons):
        if i not in shown:
            skipped += 1
            continue
        if skipped:
            rows.append(_gap(skipped))
            skipped = 0
        rows.append(_row(comparison, i == first))
    return table.columns(header, rows)


def _gap(skipped: int) -> Sequence[str]:
    return ("", f"… {skipped} more (--all)", "", "", "", "", "")


def _row(c: OperatorComparison, is_first: bool) -> Sequence[str]:
    if c.equal:
        return ("", c.name, str(c.elements), "0", "0", "0", "")
    return (
        ">" if is_first else "",
        c.name,
        str(c.elements),
        str(c.differing),
        str(c.max_ulps),
        f"{c.max_abs:.3g}",
        str(c.first),
    )


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value

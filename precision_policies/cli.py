"""`rllib-llm policy …`: look at policies, compare them, check files, plan them on a model, draw them."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import PolicyError, Violation
from .loading import available, is_path, load_policy, read_file
from .plan import ModulePlan, Plan
from .policy import PrecisionPolicy

Resolver = Callable[[str], Any]


def add_policy_parser(
    subparsers: Any, model_path: Resolver = Path, config_path: Resolver = str
) -> argparse.ArgumentParser:
    """Mounts `policy` and its commands on an argparse subparsers object; each sets `run(args) -> exit status`.

    model_path turns what a user gives as --model into a directory or a config.json; config_path turns the name of
    a shipped training config into its file (rllib_llm passes both). Commands raise PolicyError for bad input.
    """
    parser = subparsers.add_parser(
        "policy", help="precision policies: list, show, diff, check, plan, graph, schema"
    )
    commands = parser.add_subparsers(dest="policy_command", required=True, metavar="COMMAND")
    name_help = "shipped policy (see list) or YAML file"
    _command(commands, "list", _list, "shipped policies in one table")
    show = _command(commands, "show", _show, "a policy complete, with the meaning of every key")
    show.add_argument("policy", help=name_help)
    show.add_argument("--plain", action="store_true", help="without comments")
    diff = _command(commands, "diff", _diff, "what changes from policy A to policy B, in consequences")
    diff.add_argument("policy", metavar="A", help=name_help)
    diff.add_argument("other", metavar="B", help=name_help)
    check = _command(commands, "check", _check, "check a policy, or the policy of a training config")
    check.add_argument(
        "config", help="shipped policy, policy file, or training config with a key `precision`"
    )
    check.add_argument("--model", help="also resolve it on this model (default: the training config's)")
    plan = _command(commands, "plan", _plan, "the formats of every module of a model")
    plan.add_argument("policy", help=name_help)
    plan.add_argument("--model", required=True, help="model directory or config.json")
    plan.add_argument("--all", action="store_true", help="one line for each module; layers are not gathered")
    plan.add_argument("--json", action="store_true", help="the plan as JSON")
    graph = _command(commands, "graph", _graph, "draw the precision graph; report edges that differ")
    graph.add_argument("policy", help=name_help)
    graph.add_argument("--model", required=True, help="model directory or config.json")
    graph.add_argument("-o", "--output", required=True, help="picture: .svg, .png or .pdf")
    graph.add_argument("--layer", type=int, help="decoder layer to show (default: the most common kind)")
    schema = _command(commands, "schema", _schema, "JSON Schema of policy files, for editors")
    schema.add_argument("-o", "--output", help="file to write (default: standard output)")
    parser.set_defaults(model_path=model_path, config_path=config_path)
    return parser


def _command(commands: Any, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:]
    )
    parser.set_defaults(run=run)
    return parser


def _list(args: argparse.Namespace) -> int:
    rows: list[tuple[str, ...]] = [
        ("policy", "on-policy", "forward", "rollout", "dgrad", "wgrad", "saved", "fingerprint", "description")
    ]
    for name in available():
        p = load_policy(name)
        formats = (
            getattr(p.linear, k) for k in ("train_forward", "rollout_forward", "dgrad", "wgrad", "saved")
        )
        on_policy = "yes" if p.exactly_on_policy else "no"
        rows.append((name, on_policy, *formats, p.fingerprint[:12], p.description))
    _table(rows)
    return 0


def _show(args: argparse.Namespace) -> int:
    print(load_policy(args.policy).to_yaml(comments=not args.plain), end="")
    return 0


def _diff(args: argparse.Namespace) -> int:
    ours, theirs = load_policy(args.policy), load_policy(args.other)
    differences = ours.diff(theirs)
    if not differences:
        print(f"{ours.name} and {theirs.name} compute the same numbers (fingerprint {ours.fingerprint[:12]})")
    for difference in differences:
        print(f"{difference.consequence}   [{difference.key}]")
    return 0


def _check(args: argparse.Namespace) -> int:
    known = is_path(args.config) or args.config in available()
    policy, model = _policy_of(args.config if known else str(args.config_path(args.config)))
    print(f"policy {policy.name}: well-formed, fingerprint {policy.fingerprint}")
    reasons = policy.off_policy_reasons
    print("on-policy: yes, by construction" if not reasons else f"on-policy: no ({'; '.join(reasons)})")
    c, g = policy.correction, policy.guard
    print(f"correction: {c.kind}{f', upper {c.upper:g}' if c.upper else ''}")
    print(f"guard: {g.metric} beyond {g.tolerance:g} for {g.patience} iteration(s): {g.action}")
    model = args.model or model
    if model:
        plan = policy.resolve(_model_config(model, args.model_path))
        print(f"plan on {model}: {len(plan)} modules, hash {plan.hash}, {len(plan.exempt)} exempt")
    return 0


def _policy_of(source: str) -> tuple[PrecisionPolicy, str | None]:
    """The policy of a policy file or training config, and the latter's model if it names one."""
    if is_path(source) and Path(source).is_file():
        data = read_file(Path(source))
        if "precision" in data:
            model = data.get("model")
            named = model.get("path") if isinstance(model, dict) else model
            known = isinstance(named, str) and named != "???"
            return load_policy(data["precision"]), named if known else None
    return load_policy(source), None


def _plan(args: argparse.Namespace) -> int:
    plan = load_policy(args.policy).resolve(_model_config(args.model, args.model_path))
    if args.json:
        print(json.dumps(plan.to_dict()))
        return 0
    rows: list[tuple[str, ...]] = [
        (
            "module",
            "n",
            "shape",
            "bias",
            "forward",
            "rollout",
            "dgrad",
            "wgrad",
            "saved",
            "padded",
            "exempt because",
        )
    ]
    gathered: dict[tuple[Any, ...], list[ModulePlan]] = {}
    for row in plan:
        key = (row.name if args.all else _without_numbers(row.name), *_cells(row))
        gathered.setdefault(key, []).append(row)
    rows += [
        (_name(members, args.all), str(len(members)), *cells) for (_, *cells), members in gathered.items()
    ]
    _table(rows)
    _summary(plan)
    return 0


def _cells(row: ModulePlan) -> tuple[str, ...]:
    shape = "×".join(map(str, row.shape))
    padded = "×".join(map(str, row.padded_shape)) if row.padded_shape != row.shape else ""
    formats = (row.train_forward, row.rollout_forward, row.dgrad, row.wgrad, row.saved)
    reason = row.exempt_reason or (f"tied to {row.tied_to}" if row.tied_to else "")
    return (shape, "yes" if row.bias else "", *formats, padded, re.sub(r"\.\d+\.", ".*.", reason))


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


def _name(members: list[ModulePlan], each: bool) -> str:
    return members[0].name if each or len(members) == 1 else _without_numbers(members[0].name)


def _summary(plan: Plan) -> None:
    fp8 = sum(row.uses_fp8 for row in plan)
    print(f"\n{len(plan)} modules, {fp8} in fp8, {len(plan.exempt)} exempt; plan hash {plan.hash}")


def _graph(args: argparse.Namespace) -> int:
    from .drawing import draw
    from .graph_compare import compare

    policy, config = load_policy(args.policy), _model_config(args.model, args.model_path)
    try:
        print(f"wrote {draw(policy, config, args.output, args.layer)}")
    except OSError as error:
        raise _unwritable(args.output, error) from error
    differences = compare(policy, config)
    if not differences:
        print("every operator and tensor of the rollout is in the training forward")
        return 0
    print(f"{len(differences)} edges differ between the rollout and the training forward:")
    shown: dict[str, int] = {}
    for difference in differences:
        text = re.sub(r"\.\d+\.", ".*.", str(difference))
        shown[text] = shown.get(text, 0) + 1
    for text, count in shown.items():
        print(f"  {count:5d} × {text}")
    return 0


def _schema(args: argparse.Namespace) -> int:
    from .json_schema import json_schema

    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    if args.output:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise _unwritable(args.output, error) from error
        print(f"wrote {args.output}; in a policy file: # yaml-language-server: $schema={args.output}")
    else:
        print(text, end="")
    return 0


def _unwritable(output: str, error: OSError) -> PolicyError:
    return PolicyError(
        "output", [Violation("output", output, f"cannot be written: {error}", "name another file")]
    )


def _model_config(source: str, model_path: Resolver) -> dict[str, Any]:
    path = Path(model_path(source))
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        violation = Violation(
            "model", source, f"has no readable config.json: {error}", "give a model directory"
        )
        raise PolicyError("model", [violation]) from error
    if not isinstance(config, dict):
        raise PolicyError(
            "model", [Violation("model", source, "config.json is not an object", "give a model")]
        )
    return config


def _table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""The tables of docs/policies.md, made from the code: `python -m tests.policies.doc_tables` writes them anew."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from precision_policies import PrecisionPolicy, available, load_policy
from precision_policies.coerce import describe, hints, optional_part
from precision_policies.environment import TABLE

DOCUMENT = Path(__file__).parents[2] / "docs" / "policies.md"


def shipped() -> str:
    """Shipped policies with the formats of their projections."""
    rows = [
        "| policy | training forward | rollout | dgrad | wgrad | saved | on-policy | guard | fingerprint |"
    ]
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for name in available():
        p = load_policy(name)
        formats = (
            getattr(p.linear, k) for k in ("train_forward", "rollout_forward", "dgrad", "wgrad", "saved")
        )
        guard = f"{p.guard.metric} > {p.guard.tolerance:g}: {p.guard.action}"
        cells = (
            f"`{name}`",
            *formats,
            "yes" if p.exactly_on_policy else "no",
            guard,
            f"`{p.fingerprint[:12]}`",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def keys() -> str:
    """Every key with its values and meaning."""
    rows = ["| key | values | meaning |", "|---|---|---|"]
    rows += [f"| `{key}` | {values} | {text} |" for key, values, text in _leaves(PrecisionPolicy)]
    return "\n".join(rows)


def _leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    types = hints(cls)
    for field in dataclasses.fields(cls):
        hint = types[field.name]
        inner = optional_part(hint) or hint
        meta = field.metadata
        if dataclasses.is_dataclass(inner):
            yield (
                f"{prefix}{field.name}",
                "section, or null" if inner is not hint else "section",
                _plain(meta["doc"]),
            )
            yield from _leaves(inner, f"{prefix}{field.name}.")  # type: ignore[arg-type]
            continue
        values = _plain(describe(hint))
        if meta["low"] is not None:
            values += f", {meta['low']:g} to {meta['high']:g}"
        yield f"{prefix}{field.name}", values, _plain(meta["doc"])


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def environment() -> str:
    """The environment variables."""
    rows = ["| variable | where | unified-fp8 | bf16 | unset counts as | why |", "|---|---|---|---|---|---|"]
    values = {name: load_policy(name) for name in ("unified-fp8", "bf16")}
    for v in TABLE:
        where = f"{' and '.join(v.engines)} on {' and '.join(v.devices)}"
        shown = [f"`{v.value(policy)}`" for policy in values.values()]
        unset = v.unset or "a violation"
        if v.switches:
            named = " and ".join(f"`{name} = {value}`" for name, value in v.switches)
            unset = f"{unset}; with {named}: as wanted"
        rows.append(f"| `{v.name}` | {where} | {' | '.join(shown)} | {unset} | {v.why} |")
    return "\n".join(rows)


def with_tables(text: str) -> str:
    """`text` with each `<!-- table NAME -->…<!-- end -->` filled by the function of that name."""
    makers = {"shipped": shipped, "keys": keys, "environment": environment}

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table {match[1]} -->\n{makers[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- table (\w+) -->.*?<!-- end -->", fill, text, flags=re.S)


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")

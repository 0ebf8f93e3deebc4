"""The policy that a model directory was exported under, and the refusal to sample from it under another one.

A directory written by `rllib_llm.registry.package` carries OWNER_FILE, so the rule holds for copies of it too. Plain
data only: neither torch nor MLflow is imported, because every model load asks here.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from precision_policies import PolicyError, PrecisionPolicy, load_policy
from precision_policies.errors import Violation, shorten
from rllib_llm.errors import InputError, RllibLLMError

__all__ = ["OWNER_FILE", "OtherPolicyError", "Owner", "OwnerFileError", "owner_of", "refuse_other_policy"]

OWNER_FILE = "rllib_llm.json"
_FORMAT = "rllib_llm.model/1"

Holds = Literal["masters", "rollout"]


class OwnerFileError(RllibLLMError, InputError, ValueError):
    """OWNER_FILE of a model directory is not what the exporter wrote."""


class OtherPolicyError(RllibLLMError, PolicyError):
    """A registered model was to be sampled from under a policy other than its own; lists every difference."""


@dataclass(frozen=True)
class Owner:
    """Content of OWNER_FILE.

    holds: "masters" (weights rounded to the compute dtype) or "rollout" (the tensors of a rollout engine, quantised).
    plan_hash: of `policy` resolved on the directory's config.json.
    """

    policy: PrecisionPolicy
    plan_hash: str
    holds: Holds

    def write(self, directory: Path) -> None:
        """Write OWNER_FILE into a model directory."""
        data = {
            "format": _FORMAT,
            "holds": self.holds,
            "policy_name": self.policy.name,
            "policy_fingerprint": self.policy.fingerprint,
            "plan_hash": self.plan_hash,
            "policy": self.policy.to_dict(),
        }
        text = json.dumps(data, indent=1, ensure_ascii=False) + "\n"
        (directory / OWNER_FILE).write_text(text, encoding="utf-8")


def owner_of(directory: str | os.PathLike[str]) -> Owner | None:
    """The owner of a model directory; None for directories that we did not export.

    Raises:
        OwnerFileError: the file is damaged, or states a fingerprint that its policy does not have.
        PolicyError: the policy in it is not one.
    """
    file = Path(directory) / OWNER_FILE
    if not file.is_file():
        return None
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        stated, plan_hash, holds = data["policy_fingerprint"], data["plan_hash"], data["holds"]
        tree, form = data["policy"], data["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OwnerFileError(f"{file}: not readable ({error!r}): export the model again") from error
    if form != _FORMAT or holds not in ("masters", "rollout"):
        raise OwnerFileError(
            f"{file}: format {form!r}, holds {holds!r}: written by another version of rllib_llm"
        )
    policy = load_policy(tree)
    if policy.fingerprint != stated:
        raise OwnerFileError(
            f"{file}: its policy has fingerprint {policy.fingerprint[:16]}…, stated is {str(stated)[:16]}…: the file "
            "was changed; export the model again"
        )
    return Owner(policy, str(plan_hash), holds)


def refuse_other_policy(
    directory: str | os.PathLike[str], policy: PrecisionPolicy, allow: bool = False, *, override: str = ""
) -> None:
    """Nothing for a directory of the user's own, and for one exported under `policy` (by fingerprint).

    Args:
        allow: the caller was told to go on under the other policy; nothing is compared.
        override: how a user says that, for the error's last line.

    Raises:
        OtherPolicyError: every difference with its consequence.
        OwnerFileError: see `owner_of`.
    """
    owner = None if allow else owner_of(directory)
    if owner is None or owner.policy.fingerprint == policy.fingerprint:
        return
    subject = (
        f"{directory} was trained under policy '{owner.policy.name}' ({owner.policy.fingerprint[:12]}) and is to be "
        f"used under '{policy.name}' ({policy.fingerprint[:12]}). Use its own policy, or "
        f"{override or 'allow_other_policy=True'} to go on deliberately"
    )
    found = [
        Violation(d.key, d.theirs, d.consequence, f"the model's policy has {shorten(d.ours)}")
        for d in owner.policy.diff(policy)
    ]
    raise OtherPolicyError(subject, found)

"""Environment variables in experiment files: only those that the person who starts the run has allowed.

A file from somebody else may name its own tracking server. With OmegaConf's own `${oc.env:NAME}` it could send any
variable there as a tag or a parameter, tokens included; an allow list inside the file would be no protection.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from precision_policies.errors import Violation

__all__ = ["ALLOWED", "only_allowed_variables"]

ALLOWED = "RLLIB_LLM_CONFIG_ENV"
"""Names, separated by commas, of the variables that `${oc.env:NAME}` may read."""

_LOCK = threading.Lock()  # OmegaConf's resolvers are of the process


@contextlib.contextmanager
def only_allowed_variables(found: list[Violation]) -> Iterator[None]:
    """While open, `${oc.env:NAME}` reads variables that `ALLOWED` names; others are appended to `found`.

    What another resolver of the process does is not watched.
    """
    allowed = {name.strip() for name in os.environ.get(ALLOWED, "").split(",")}

    def read(*arguments: Any, _node_: Any) -> Any:
        name = str(arguments[0]) if arguments else ""
        if name in allowed:
            return oc.env(*arguments)
        key = _node_._get_full_key(None)
        problem = "reads an environment variable, and this run does not allow it"
        remedy = f"write the value itself, or start with {ALLOWED}={name}"
        found.append(Violation(key, f"${{oc.env:{name}}}", problem, remedy))
        return ""

    with _LOCK:
        _resolve_with(read)
        try:
            yield
        finally:
            _resolve_with(oc.env)


def _resolve_with(resolver: Callable[..., Any]) -> None:
    # OmegaConf 2.4 renamed the function, and warns of the old name
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("oc.env", resolver, replace=True)

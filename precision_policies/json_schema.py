"""JSON Schema of policy files, for editors and for checks outside Python.

It describes a file as people write it: every key optional (the rest comes from `extends`), unknown keys refused,
closed choices listed, each with its description. Combinations are checked by `load_policy` only.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, get_args, get_origin

from .coerce import hints, optional_part
from .policy import PrecisionPolicy
from .schema import SCHEMA_VERSION


def json_schema() -> dict[str, Any]:
    """The schema as plain data (draft 2020-12)."""
    schema = _object(PrecisionPolicy)
    extends = "shipped policy or YAML file to start from; sections are merged key by key, lists replaced"
    schema["properties"] = {"extends": {"type": "string", "description": extends}, **schema["properties"]}
    schema["properties"]["schema_version"] = {
        "const": SCHEMA_VERSION,
        "description": "version of this format",
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "rllib_llm precision policy",
        "required": ["schema_version"],
        **schema,
    }


def _object(cls: type) -> dict[str, Any]:
    types, properties = hints(cls), {}
    for field in dataclasses.fields(cls):
        entry = _entry(types[field.name])
        entry["description"] = field.metadata["doc"]
        for bound, keyword in (("low", "minimum"), ("high", "maximum")):
            if field.metadata[bound] is not None:
                entry[keyword] = field.metadata[bound]
        properties[field.name] = entry
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _entry(hint: Any) -> dict[str, Any]:
    inner = optional_part(hint)
    if inner is not None:
        entry = _entry(inner)
        return {**entry, "type": [entry["type"], "null"]}
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast(type, hint))
    if get_origin(hint) is typing.Literal:
        return {"type": "string", "enum": list(get_args(hint))}
    if get_origin(hint) is tuple:
        return {"type": "array", "items": {"type": "string"}}
    if get_origin(hint) is dict:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string"}[hint]}

"""What a text is for an OpenEnv server's action, by its JSON schema; and its observations as text."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envs.adapters.choices import Choices
from envs.arguments import unknown

_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
_KINDS = ("boolean", "integer", "number", "string", "array", "object")


@dataclass(frozen=True)
class Field:
    """The part of an action that a text is put into."""

    name: str
    kind: str
    """Of JSON schema; others than those of `_KINDS` are read as JSON."""
    choices: tuple[str, ...] = ()
    """The texts that are accepted; empty: any."""

    def read(self, text: str) -> Any:
        """The value that a text means; None: none."""
        if self.choices:
            number = Choices(len(self.choices), dict(enumerate(self.choices))).read(text)
            return None if number is None else self.choices[number]
        match self.kind:
            case "string":
                return text
            case "integer" | "number":
                found = _NUMBER.search(text)
                return _number(found.group(), self.kind) if found else None
            case "boolean":
                said = Choices(2, {0: "false", 1: "true"}).read(text)
                return None if said is None else bool(said)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return None


def field_of(
    id: str, schema: Mapping[str, Any], wanted: str | None, fixed: Mapping[str, Any]
) -> Field | None:
    """The field of an action's schema that a text is for; None: which one is not clear.

    Raises:
        ValueError: `wanted`, or one that is fixed, does not exist.
    """
    properties = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
    for name in [*fixed, *([] if wanted is None else [wanted])]:
        if name not in properties:
            raise unknown(f"{id}: field", name, properties)
    if wanted is None:
        free = [name for name in properties if name not in fixed]
        required = [name for name in schema.get("required", []) if name in free]
        found = next((names[0] for names in (free, required) if len(names) == 1), None)
        if found is None:
            return None
        wanted = found
    return _field(wanted, properties[wanted], schema.get("$defs", {}))


def written(id: str, observation: Mapping[str, Any], show: str | None) -> str:
    """An observation as text.

    Raises:
        ValueError: there is no part `show`.
    """
    value: Any = {name: one for name, one in observation.items() if name != "metadata" and one is not None}
    if show is None:
        texts = [one for one in value.values() if isinstance(one, str)]
        return texts[0] if len(texts) == len(value) == 1 else _json(value)
    for part in show.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise unknown(f"{id}: show", show, value if isinstance(value, Mapping) else ())
        value = value[part]
    return value if isinstance(value, str) else _json(value)


def _field(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Field:
    """Look through references and `null` alternatives for what kind of value it is."""
    options = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    found = options[0] if len(options) == 1 else {}
    if "$ref" in found:
        found = definitions.get(str(found["$ref"]).rpartition("/")[2], {})
    choices = found.get("enum", [])
    if choices and all(isinstance(one, str) for one in choices):
        return Field(name, "string", tuple(choices))
    kind = found.get("type")
    return Field(name, kind if kind in _KINDS else "any")


def _number(text: str, kind: str) -> int | float | None:
    if len(text) > 20:
        return None
    if kind == "integer":
        return int(text) if "." not in text else None
    return float(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "))

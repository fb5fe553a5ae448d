"""Reading a config: a YAML file, dotted `key=value` overrides, one clear message a mistake."""

import re
import reprlib
from collections.abc import Hashable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from opentinker_core.config.schema import TrainConfig
from opentinker_core.errors import NotFoundError, UsageError

_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+\Z")
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_NULLS = {"", "null", "Null", "NULL", "~"}
_MISSING = object()
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 4, 80, 80, 80
"""Shows what a message has room for: with aliases, a few lines of YAML are a value without end."""

Config = TypeVar("Config", bound=BaseModel)


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys, reads `5e-4` as a number and keeps dates as text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class's own protocol
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP_TAG]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.constructor.ConstructorError(None, None, "a key must be text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here a second time", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a training config from a YAML file and apply `key=value` overrides, later ones winning.

    A key is dotted (`rl.optimizer.learning_rate`); a value is read as YAML (`sft=null` drops a phase).

    Raises:
        UsageError: names the file or override, the field, the value and what is accepted.
    """
    return load(path, overrides, TrainConfig)


def load(path: Path | str | None, overrides: Sequence[str], schema: type[Config]) -> Config:
    """Read a config of any kind; None: there is no file, and overrides replace defaults.

    Raises:
        UsageError: names the file or override, the field, the value and what is accepted.
    """
    data = {} if path is None else read_mapping(Path(path), schema)
    return validate(data, schema, "config" if path is None else str(path), overrides)


def read_mapping(path: Path, schema: type[BaseModel] = TrainConfig) -> dict[str, Any]:
    """The mapping in a YAML file.

    Args:
        schema: whose keys a message names.

    Raises:
        UsageError: no such file, not UTF-8, not YAML (with the line), or not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise NotFoundError(f"{path}: no such file; accepted: the path of a YAML config") from error
    except IsADirectoryError as error:
        raise UsageError(f"{path}: is a directory; accepted: the path of a YAML config") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: byte {error.start} is not UTF-8 text; accepted: a YAML config") from error
    except (OSError, ValueError) as error:  # not readable; a NUL in the name
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    data = _parse(text, str(path))
    if not isinstance(data, dict):
        found = "empty" if data is None else f"a {type(data).__name__}"
        raise UsageError(f"{path}: is {found}; accepted: a mapping of the keys {_keys(schema)}")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set one dotted `key=value` in `data`, in place; missing mappings on the way are made.

    Raises:
        UsageError: not of the form `key=value`, bad YAML, or the key goes through a plain value.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise UsageError(f"override {override!r}: accepted: key=value, such as rl.steps=50")
    here = data
    for depth, part in enumerate(parts[:-1]):
        if here.get(part) is None:
            here[part] = {}
        if not isinstance(here[part], dict):
            at = ".".join(parts[: depth + 1])
            raise UsageError(
                f"override {override!r}: {at} is {_SHORT.repr(here[part]):.60}, which has no keys"
            )
        here = here[part]
    here[parts[-1]] = _override_value(text, override)


def validate_config(data: dict[str, Any], source: str, overrides: Sequence[str] = ()) -> TrainConfig:
    """As `validate`, for training configs."""
    return validate(data, TrainConfig, source, overrides)


def validate(
    data: dict[str, Any], schema: type[Config], source: str, overrides: Sequence[str] = ()
) -> Config:
    """Apply overrides to `data`, in place, and check it against a schema.

    Raises:
        UsageError: a wrong override, or one line a wrong field.
    """
    for override in overrides:
        apply_override(data, override)
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        lines = _explain(error, data, schema)
    if overrides:
        source = f"{source} with {' '.join(overrides)}"
    if len(lines) == 1:
        raise UsageError(f"{source}: {lines[0]}")
    raise UsageError(f"{source}: {len(lines)} fields are wrong\n" + "\n".join(f"  {line}" for line in lines))


def _parse(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise UsageError(f"{source}: {where}not valid YAML: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{source}: not valid YAML: {error}") from error
    except RecursionError as error:
        raise UsageError(f"{source}: nested too deeply") from error
    except ValueError as error:  # of Python itself: a number of thousands of digits
        raise UsageError(f"{source}: not valid YAML: {str(error).partition(';')[0]}") from error


def _override_value(text: str, override: str) -> Any:
    value = _parse(text, f"override {override!r:.80}")
    # `-`, `a: b` and `#` are meant as text here: block collections and comments need more than a line.
    block = isinstance(value, list | dict) and not text.lstrip().startswith(("[", "{"))
    return text if block or (value is None and text.strip() not in _NULLS) else value


def _explain(error: ValidationError, data: dict[str, Any], schema: type[BaseModel]) -> list[str]:
    """One line a field; pydantic reports a value that fits no member of a union once per member."""
    reasons: dict[str, list[str]] = {}
    for detail in error.errors(include_url=False):
        path, value = _locate(detail, data)
        field = "".join(f"{part}." for part in path)[:-1]
        shown = "" if value is _MISSING or not path else f"{_SHORT.repr(value):.80}: "
        start = f"{field}: {shown}" if field else ""
        reason = _reason(detail, path, schema)
        if reason not in reasons.setdefault(start, []):
            reasons[start].append(reason)
    return [start + " or ".join(found) for start, found in reasons.items()]


def _locate(detail: ErrorDetails, data: Any) -> tuple[list[int | str], Any]:
    """The part of the location that exists in the data (the rest names members of unions), and its value."""
    path: list[int | str] = []
    for part in detail["loc"]:
        inside = (isinstance(data, dict) and part in data) or (
            isinstance(data, list | tuple) and isinstance(part, int) and part < len(data)
        )
        if not inside:
            return ([*path, part], _MISSING) if detail["type"] == "missing" else (path, data)
        path.append(part)
        data = data[part]
    return path, data


def _reason(detail: ErrorDetails, path: list[int | str], schema: type[BaseModel]) -> str:
    match detail["type"]:
        case "extra_forbidden":
            return _unknown_key(path, schema)
        case "missing":
            return "is missing"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case "model_type":
            model = _model_at(path, schema)
            return "accepted is a mapping" + (f" of the keys {_keys(model)}" if model else "")
        case "tuple_type":
            return "accepted is a list"
    return "accepted is " + detail["msg"].removeprefix("Input should be ")


def _unknown_key(path: list[int | str], schema: type[BaseModel]) -> str:
    model = _model_at(path[:-1], schema)
    if model is None:
        return "is not a known key"
    close = get_close_matches(str(path[-1]), model.model_fields, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"is not a known key{hint} (accepted: {_keys(model)})"


def _model_at(path: Sequence[int | str], schema: type[BaseModel]) -> type[BaseModel] | None:
    """The config class that stands at a dotted path of the schema."""
    model, inside = schema, False
    for part in path:
        if inside:  # an index or a key that users choose
            inside = False
            continue
        annotation = model.model_fields[str(part)].annotation
        options = [annotation, *getattr(annotation, "__args__", ())]
        found = [o for o in options if isinstance(o, type) and issubclass(o, BaseModel)]
        if not found:
            return None
        model, inside = found[0], get_origin(annotation) in (dict, tuple)
    return model


def _keys(model: type[BaseModel]) -> str:
    return ", ".join(model.model_fields)

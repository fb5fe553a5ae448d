"""Which tasks the installed reasoning-gym has, read from its source files.

Importing the package imports all of its tasks (about a second); a list of names needs none of them.
"""

import ast
import importlib.util
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from envs.arguments import Argument

_REGISTERED = re.compile(r"^register_dataset\(\s*(\w+|\"[^\"]+\"),\s*(\w+),\s*(\w+)", re.MULTILINE)
_NAME = re.compile(r"^DATASET_NAME\s*=\s*[\"']([^\"']+)[\"']", re.MULTILINE)
_OWN_FIELDS = ("seed", "size")
"""Fields of every task's config that the adapter sets itself."""


@dataclass(frozen=True)
class Task:
    """One reasoning-gym dataset."""

    name: str
    summary: str
    arguments: tuple[Argument, ...]


@lru_cache(maxsize=1)
def tasks() -> dict[str, Task]:
    """All tasks by name; empty if reasoning-gym is not installed."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or not spec.submodule_search_locations:
        return {}
    root = Path(spec.submodule_search_locations[0])
    found = [task for path in sorted(root.rglob("*.py")) if (task := _read(path)) is not None]
    return {task.name: task for task in sorted(found, key=lambda task: task.name)}


def _read(path: Path) -> Task | None:
    content = path.read_bytes()
    if b"\nregister_dataset(" not in content:
        return None
    source = content.decode()
    registered = _REGISTERED.search(source)
    if registered is None:
        return None
    name, dataset, config = registered.groups()
    if named := _NAME.search(source):
        name = named[1]
    name = name.strip('"')
    return Task(name, _summary(source, dataset) or name.replace("_", " "), _arguments(source, config))


def _summary(source: str, dataset: str) -> str:
    """The first line of the dataset's docstring, else of the module's."""
    own = re.search(rf'^class {dataset}\b.*?:\n\s+"""\s*(.*?)\s*(?:\n|""")', source, re.MULTILINE)
    module = re.match(r'\s*"""\s*(.*?)\s*(?:\n|""")', source)
    found = own or module
    return found[1].rstrip(".") if found else ""


def _arguments(source: str, config: str) -> tuple[Argument, ...]:
    """The annotated fields of a config dataclass, parsed alone: whole files would take seconds."""
    block = re.search(rf"^class {config}\b.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    if block is None:
        return ()
    (definition,) = ast.parse(block[0]).body
    assert isinstance(definition, ast.ClassDef)
    return tuple(
        Argument(field.target.id, ast.unparse(field.annotation), _default(field.value))
        for field in definition.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and field.target.id not in _OWN_FIELDS
    )


def _default(value: ast.expr | None) -> str:
    """The default as written; of `field(default_factory=lambda: x)` the x."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        value = next((word.value for word in value.keywords if word.arg != "metadata"), value)
        value = value.body if isinstance(value, ast.Lambda) else value
    return ast.unparse(value)

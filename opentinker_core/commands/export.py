"""`opentinker export POLICY@VERSION DIR`: a version as files that other tools load."""

import json
import shutil
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opentinker_core.errors import UsageError

if TYPE_CHECKING:
    from opentinker_core.policies.types import PolicyVersion
    from opentinker_core.runtime.workspace import Workspace


class Dtype(StrEnum):
    """Number format of a merged model."""

    AUTO = "auto"
    """That of the base model's files."""
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


def export(
    version: Annotated[str, typer.Argument(metavar="POLICY[@VERSION]", show_default=False)],
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)],
    merged: Annotated[bool, typer.Option("--merged", help="Fold the adapter into the base model.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Number format of a merged model.")] = Dtype.AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a version to DIR: a PEFT directory, or with --merged a whole Hugging Face model."""
    from opentinker_core.runtime.workspace import Workspace

    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"DIR: {str(directory)!r} is not empty; accepted: a new or empty directory")
    workspace = Workspace()
    found = workspace.catalog.version(version)
    directory.parent.mkdir(parents=True, exist_ok=True)
    # Written beside its place and renamed, so that a directory that is there is complete.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        target = Path(scratch) / "files"
        if merged:
            _write_merged(workspace, found, target, dtype)
        else:
            source = workspace.snapshots.fetch(found.sampler.uri, found.sampler.digest)
            shutil.copytree(source, target)
            _name_base_model(workspace, found, target / "adapter_config.json")
        if directory.exists():
            directory.rmdir()
        target.replace(directory)
    files = sorted(path.name for path in directory.iterdir())
    if as_json:
        result = {
            "version": found.ref,
            "digest": found.sampler.digest,
            "directory": str(directory),
            "merged": merged,
            "files": files,
        }
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{found.ref} is in {directory}: {', '.join(files)}")


def _name_base_model(workspace: "Workspace", version: "PolicyVersion", config: Path) -> None:
    """Let PEFT find the base model: a bundled one by its local directory, which snapshots do not name."""
    from opentinker_core.models.bundled import BUNDLED
    from opentinker_core.models.source import resolve

    base_model = workspace.catalog.policy(version.policy_name).base_model
    if base_model in BUNDLED:
        values = json.loads(config.read_text())
        values["base_model_name_or_path"] = str(resolve(base_model, workspace.home).path)
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _write_merged(workspace: "Workspace", version: "PolicyVersion", target: Path, dtype: Dtype) -> None:
    import torch

    from opentinker_core.lora.layer import linear_shapes
    from opentinker_core.lora.layout import ModelLayout
    from opentinker_core.lora.merge import merge
    from opentinker_core.lora.peft_format import read_peft
    from opentinker_core.models.loading import load_model, load_tokenizer, no_progress_bar
    from opentinker_core.models.source import resolve

    source = resolve(workspace.catalog.policy(version.policy_name).base_model, workspace.home)
    model = load_model(source, "cpu", torch.float32)
    stored = json.loads((source.path / "config.json").read_text())
    wanted = dtype if dtype is not Dtype.AUTO else stored.get("dtype", stored.get("torch_dtype", "float32"))
    snapshot = workspace.snapshots.fetch(version.sampler.uri, version.sampler.digest)
    merge(model, read_peft(snapshot, ModelLayout.of(linear_shapes(model)), model.device))
    with no_progress_bar():
        model.to(getattr(torch, wanted)).save_pretrained(target)
    for weights in target.glob("*.safetensors"):  # written for their owner alone; the others are for all
        weights.chmod((target / "config.json").stat().st_mode)
    load_tokenizer(source).save_pretrained(target)

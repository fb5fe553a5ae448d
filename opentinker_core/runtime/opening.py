"""Open a run: find it again by id or flow run, or start it from the state its config names."""

import logging
import subprocess
from pathlib import Path

from opentinker_core.config.schema import TrainConfig
from opentinker_core.digests import digest_json
from opentinker_core.errors import NotFoundError, OpenTinkerError, UsageError
from opentinker_core.policies.catalog import Catalog
from opentinker_core.policies.refs import BASE
from opentinker_core.policies.types import Policy, PolicyVersion, Run, RunStatus

_LOG = logging.getLogger(__name__)

_FRESH = "base"


def config_digest(config: TrainConfig) -> str:
    """The digest under which a config is recorded."""
    return digest_json(config.model_dump(mode="json"))


def find_run(
    catalog: Catalog, run_id: str | None, flow_run_id: str | None, name: str | None = None
) -> Run | None:
    """The run to go on with: named, or that of a flow run which is retried.

    `name`: of the run, as a flow run may have several.

    Raises:
        NotFoundError: `run_id` names no run.
    """
    if run_id is not None:
        return catalog.run(run_id)
    return catalog.run_of_flow(flow_run_id, name) if flow_run_id is not None else None


def recorded_config(run: Run, given: TrainConfig | None) -> TrainConfig:
    """The config of `run`, which `given` must equal except for the start that was pinned.

    Raises:
        UsageError: it differs: a run that changed its config half way would not be replayable.
    """
    recorded = TrainConfig.model_validate(run.config)
    if given is not None:
        policy = given.policy.model_copy(update={"start": recorded.policy.start})
        given = given.model_copy(update={"policy": policy})
        # Not by the digests: what has been added to configs since then has its default in both.
        if given.model_dump(mode="json") != recorded.model_dump(mode="json"):
            raise UsageError(
                f"config: not the one run {run.run_id} was started with ({run.config_digest[:12]}); "
                "accepted: the same config, or a new run"
            )
    return recorded


def start_run(
    catalog: Catalog, config: TrainConfig, flow_run_id: str | None
) -> tuple[Run, TrainConfig, Policy]:
    """Record a new run; what its start refers to is pinned to a version number first.

    Raises:
        UsageError: the start does not exist, or its base model, LoRA config or checkpoint do not fit.
    """
    source = starting_version(catalog, config)
    if source is not None:
        config = config.model_copy(update={"policy": config.policy.model_copy(update={"start": source.ref})})
    wanted = config.policy
    forked_from = source.ref if source is not None and source.policy_name != wanted.name else None
    policy = catalog.create_policy(wanted.name, wanted.base_model, wanted.lora, forked_from=forked_from)
    for other in catalog.runs():
        if other.policy_id == policy.policy_id and other.status is RunStatus.RUNNING:
            _LOG.warning(
                "policy %s: run %s is training it too, or was killed; `latest` is of the one that publishes "
                "last, and another policy.name keeps them apart",
                policy.name,
                other.run_id,
            )
    run = catalog.start_run(
        config.name,
        policy.policy_id,
        config.model_dump(mode="json"),
        config_digest(config),
        code_commit(),
        flow_run_id,
    )
    return run, config, policy


def check_startable(catalog: Catalog, config: TrainConfig) -> None:
    """Refuse a new run that could not be started, before a model is loaded and anything is recorded.

    Raises:
        UsageError: as `start_run`; or an opponent's version does not exist, or is of another base model.
    """
    starting_version(catalog, config)
    wanted = config.policy
    if known := next((one for one in catalog.policies() if one.name == wanted.name), None):
        for field, ours, theirs in (
            ("base_model", wanted.base_model, known.base_model),
            ("lora", wanted.lora, known.lora),
        ):
            if ours != theirs:
                raise UsageError(
                    f"policy.{field}: {ours!r}, but the policy {wanted.name!r} exists with {theirs!r}; "
                    "accepted: the same, or another name"
                )
    for name, opponent in config.joint.opponents.items() if config.joint is not None else ():
        if opponent.version is None or opponent.version == BASE:
            continue
        try:
            version = catalog.version(opponent.version)
        except NotFoundError as error:
            raise NotFoundError(f"opponents.{name}.version: {error}") from error
        base_model = catalog.policy(version.policy_name).base_model
        if base_model != wanted.base_model:
            raise UsageError(
                f"opponents.{name}.version: {opponent.version} is of base model {base_model!r}; "
                f"accepted: versions of {wanted.base_model!r}"
            )


def starting_version(catalog: Catalog, config: TrainConfig) -> PolicyVersion | None:
    """The version that `policy.start` names; None for a fresh adapter.

    Raises:
        UsageError: it does not exist, or does not fit the config.
    """
    start = config.policy.start
    if start == _FRESH:
        return None
    try:
        version = catalog.version(start if "@" in start else f"{config.policy.name}@{start}")
    except OpenTinkerError as error:
        raise UsageError(f"policy.start: {start!r:.80} names no version: {error}") from error
    source = catalog.policy(version.policy_name)
    for field, ours, theirs in (
        ("base_model", config.policy.base_model, source.base_model),
        ("lora", config.policy.lora, source.lora),
    ):
        if ours != theirs:
            raise UsageError(
                f"policy.{field}: {ours!r}, but {version.ref} has {theirs!r}; accepted: the same"
            )
    if version.checkpoint is None:
        raise UsageError(
            f"policy.start: the checkpoint of {version.ref} was pruned (record.keep_checkpoints); "
            "accepted: a version that still has one, as `opentinker versions` shows"
        )
    return version


def resume_run(catalog: Catalog, run: Run, flow_run_id: str | None) -> Run:
    """Mark `run` as running again, under the flow run that goes on with it."""
    return catalog.update_run(run.run_id, status=RunStatus.RUNNING, flow_run_id=flow_run_id)


def code_commit() -> str | None:
    """The git commit of the checkout this code runs from, `-dirty` if it has changes; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # git is not there, or does not trust the directory: the commit is unknown
    return found.stdout.strip() or None

"""`opentinker deploy`: bring a Prefect server in line with deployments/prefect.yaml."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.orchestrator import orchestrator
from opentinker_core.config.loading import read_mapping
from opentinker_core.config.settings import Settings
from opentinker_core.errors import OpenTinkerError, UsageError

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.client.orchestration import SyncPrefectClient

Row = dict[str, str]
ROOT = Path(__file__).resolve().parent.parent
"""The checkout, or where the packages are installed; entrypoints are relative to it."""


def deploy(
    file: Annotated[
        Path | None, typer.Option("--file", help="Another prefect.yaml than the installation's own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Set up work pool, queues and deployments on a Prefect server; run again, it changes nothing.

    The server is that of PREFECT_API_URL, of a Prefect profile, or of a running `opentinker up`.
    """
    wanted = read_mapping(file or default_file())
    settings = Settings()
    with orchestrator(settings.home, private=False) as prefect:
        rows = apply(wanted, ROOT)
    if as_json:
        print(json.dumps({"api_url": prefect.api_url, "objects": rows}))
    else:
        _print(rows, prefect.ui_url)


def default_file() -> Path:
    """The prefect.yaml that lies beside this code."""
    return ROOT / "deployments" / "prefect.yaml"


def apply(wanted: dict[str, Any], root: Path) -> list[Row]:
    """Create or update what `wanted` names; returns what was done, one row an object.

    Raises:
        UsageError: an entrypoint does not exist, or the parameters do not fit its flow.
        OpenTinkerError: the server refused.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException

    try:
        with get_client(sync_client=True) as client:
            rows = []
            for name, pool in wanted.get("definitions", {}).get("work_pools", {}).items():
                rows.append(_pool(client, name, pool))
                for queue, limits in pool.get("queues", {}).items():
                    rows.append(_queue(client, name, queue, limits))
            return rows + [_deployment(client, one, root) for one in wanted.get("deployments", [])]
    except (httpx.HTTPError, PrefectException) as error:
        raise OpenTinkerError(f"Prefect: {type(error).__name__}: {error}") from error


def check_parameters(deployment: dict[str, Any]) -> "Flow[..., Any]":
    """The flow of a deployment, whose parameters are checked against its signature.

    Raises:
        UsageError: names the deployment and what is wrong.
    """
    from prefect.exceptions import ParameterBindError, ParameterTypeError, ScriptError
    from prefect.flows import load_flow_from_entrypoint

    name, entrypoint = deployment["name"], deployment["entrypoint"]
    try:
        flow: Flow[..., Any] = load_flow_from_entrypoint(entrypoint, use_placeholder_flow=False)
        flow.validate_parameters(deployment.get("parameters", {}))
    except (
        ParameterBindError,
        ParameterTypeError,
        ScriptError,
        ImportError,
        AttributeError,
        OSError,
    ) as error:
        raise UsageError(f"deployment {name!r} ({entrypoint}): {error}") from error
    return flow


def _pool(client: "SyncPrefectClient", name: str, pool: dict[str, Any]) -> Row:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        existing = client.read_work_pool(name)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        client.create_work_pool(
            WorkPoolCreate(
                name=name, type=pool["type"], description=pool.get("description"), base_job_template=template
            )
        )
        return _row("work pool", name, "created")
    if existing.type != pool["type"]:
        raise UsageError(f"work pool {name!r} has the type {existing.type!r}; accepted: {pool['type']!r}")
    return _row("work pool", name, "unchanged")


def _queue(client: "SyncPrefectClient", pool: str, name: str, limits: dict[str, Any]) -> Row:
    from prefect.exceptions import ObjectNotFound

    shown = f"{pool}/{name}"
    try:
        existing = client.read_work_queue_by_name(name, work_pool_name=pool)
    except ObjectNotFound:
        client.create_work_queue(name, work_pool_name=pool, **limits)
        return _row("queue", shown, "created")
    if all(getattr(existing, key) == value for key, value in limits.items()):
        return _row("queue", shown, "unchanged")
    client.update_work_queue(existing.id, **limits)
    return _row("queue", shown, "updated")


def _deployment(client: "SyncPrefectClient", wanted: dict[str, Any], root: Path) -> Row:
    from prefect.exceptions import ObjectNotFound

    flow = check_parameters(wanted | {"entrypoint": str(root / wanted["entrypoint"])})
    shown = f"{flow.name}/{wanted['name']}"
    fields = _fields(flow, wanted, root)
    try:
        existing = client.read_deployment_by_name(shown)
    except ObjectNotFound:
        existing = None
    if existing is not None and _same(existing, fields):
        return _row("deployment", shown, "unchanged")
    client.create_deployment(flow_id=client.create_flow(flow), name=wanted["name"], **fields)
    return _row("deployment", shown, "updated" if existing else "created")


def _fields(flow: "Flow[..., Any]", wanted: dict[str, Any], root: Path) -> dict[str, Any]:
    from prefect.client.schemas.actions import DeploymentScheduleCreate
    from prefect.client.schemas.schedules import CronSchedule
    from prefect.utilities.callables import parameter_schema

    pool = wanted["work_pool"]
    return {
        "description": wanted.get("description"),
        "tags": wanted.get("tags", []),
        "entrypoint": wanted["entrypoint"],
        "parameters": wanted.get("parameters", {}),
        "parameter_openapi_schema": parameter_schema(flow).model_dump_for_openapi(),
        "work_pool_name": pool["name"],
        "work_queue_name": pool["work_queue_name"],
        "job_variables": pool.get("job_variables", {}),
        "pull_steps": [{"prefect.deployments.steps.set_working_directory": {"directory": str(root)}}],
        "schedules": [
            DeploymentScheduleCreate(
                schedule=CronSchedule(cron=one["cron"], timezone=one.get("timezone", "UTC")),
                active=one.get("active", True),
                slug=one["slug"],
            )
            for one in wanted.get("schedules", [])
        ],
        "enforce_parameter_schema": True,
    }


def _same(existing: Any, fields: dict[str, Any]) -> bool:
    """Whether a deployment is what `fields` say; a schedule that was paused by hand stays so."""
    plain = {key: value for key, value in fields.items() if key != "schedules"}
    schedules = {one.slug: one.schedule for one in existing.schedules}
    return all(getattr(existing, key) == value for key, value in plain.items()) and schedules == {
        one.slug: one.schedule for one in fields["schedules"]
    }


def _row(kind: str, name: str, done: str) -> Row:
    return {"kind": kind, "name": name, "done": done}


def _print(rows: list[Row], ui_url: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("", "name", "", box=None, header_style="dim")
    for row in rows:
        colour = "dim" if row["done"] == "unchanged" else "green"
        table.add_row(row["kind"], row["name"], f"[{colour}]{row['done']}[/]")
    console.print(table)
    example = next((row["name"] for row in rows if row["kind"] == "deployment"), "")
    console.print(f"\nstart one:  prefect deployment run {example}\nlook:       {ui_url}", highlight=False)

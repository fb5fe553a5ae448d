"""Look at a training run on the pages of Prefect and MLflow with headless Chromium, and take pictures.

    python docs/screenshots.py --out pictures                        # trains a small run first
    python docs/screenshots.py --out pictures --home ~/.opentinker --run RUN

Each page must show, as visible text, what a person comes for; otherwise the script says what is missing
and ends with code 1. It needs Chromium and its driver (Debian: `chromium`, `chromium-driver`) and the
extra `test`.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver

from flows.servers import free_port
from opentinker_core.config.settings import Settings
from opentinker_core.policies.types import PolicyVersion, Run, TrajectorySet
from opentinker_core.runtime.workspace import Workspace

ROOT = Path(__file__).resolve().parent.parent
CONFIG = ROOT / "deployments" / "configs" / "tiny_rl.yaml"
SMALL = (
    *("sft.steps=12", "sft.publish_every=6", "rl.steps=4", "rl.groups=8", "rl.group_size=8"),
    *("record.artifact_every=4", "record.trace_episodes=2", "evaluation.samples=2"),
)
"""A run of seconds that has every phase."""
PAGE_TIMEOUT_S = 120.0
SETTLE_S = 1.5
"""Charts are drawn a moment after the text stands."""
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1400,1000"),
)
_WITHOUT_ASSISTANT = """
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
"""


@dataclass(frozen=True)
class Servers:
    """Addresses of a running `opentinker up`, and the home it serves."""

    home: Path
    prefect_url: str
    mlflow_url: str


@dataclass(frozen=True)
class Page:
    """What a page must show: texts, targets of links, and texts that a click on `click` (XPath) reveals."""

    name: str
    url: str
    texts: tuple[str, ...]
    links: tuple[str, ...] = ()
    click: str = ""
    revealed: tuple[str, ...] = ()


class PageError(AssertionError):
    """A page does not show what it must."""


def find_browser() -> tuple[str, str] | None:
    """The programs of Chromium and of its driver, if both are installed."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def chromium(programs: tuple[str, str]) -> Iterator[WebDriver]:
    """A headless browser with a fresh profile that talks to nobody but the pages it is sent to."""
    options = webdriver.ChromeOptions()
    options.binary_location, driver_path = programs
    with tempfile.TemporaryDirectory(prefix="opentinker-chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=Service(driver_path))
        try:
            source = {"source": _WITHOUT_ASSISTANT}
            driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source)
            yield driver
        finally:
            driver.quit()


@contextmanager
def served(home: Path) -> Iterator[Servers]:
    """`opentinker up --workers` on `home`, on free ports."""
    ports = ["--port", str(free_port()), "--mlflow-port", str(free_port())]
    with _started(home, "up", "--workers", "--json", *ports) as up:
        assert up.stdout is not None
        line = up.stdout.readline()
        if not line:
            raise RuntimeError("opentinker up did not start")
        said = json.loads(line)
        try:
            yield Servers(home, said["prefect_url"], said["mlflow_url"])
        finally:
            up.send_signal(signal.SIGTERM)


def trained(home: Path) -> str:
    """Train a small run; returns its id."""
    with _started(home, "train", str(CONFIG), *SMALL, "--json") as train:
        output, _ = train.communicate()
    if train.returncode:
        raise RuntimeError(f"opentinker train ended with {train.returncode}")
    return str(json.loads(output)["run"])


@contextmanager
def _started(home: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    elsewhere = ("PREFECT_API_URL", "OPENTINKER_MLFLOW_UI_URL")
    environment = {name: value for name, value in os.environ.items() if name not in elsewhere}
    environment["OPENTINKER_HOME"] = str(home)
    command = [sys.executable, "-m", "flows.cli", *arguments]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            if sys.exc_info()[0] is not None:
                process.terminate()


def pages(servers: Servers, run_id: str) -> list[Page]:
    """The pages that show a completed run that was trained by RL, and what must stand on them."""
    catalog = Workspace(Settings(home=servers.home)).catalog
    run = catalog.run(run_id)
    final = catalog.run_versions(run.run_id)[-1]
    sets = [one for one in catalog.trajectory_sets(run.run_id) if one.purpose == "train"]
    return _prefect(servers, run, final, sets) + _mlflow(servers, run, final, sets)


def _prefect(servers: Servers, run: Run, final: PolicyVersion, sets: list[TrajectorySet]) -> list[Page]:
    flow_run = f"{servers.prefect_url}/v2/runs/flow-run/{run.flow_run_id}"
    key = re.sub(r"[^a-z0-9]+", "-", final.policy_name.lower())
    phases = [
        f"{phase}[{final.step}]" for phase in ("rollout", "build-batch", "update-policy", "publish-snapshot")
    ]
    artifacts = tuple(f"{key}-{kind}" for kind in ("metrics", "episodes", "lineage", "progress"))

    wanted = {"flow_runs": {"id": {"any_": [run.flow_run_id]}}, "sort": "CREATED_DESC"}
    found = _json(f"{servers.prefect_url}/api/artifacts/filter", wanted)
    latest = {one["key"]: one["id"] for one in reversed(found)}

    def artifact(name: str, *texts: str, links: tuple[str, ...] = ()) -> Page:
        url = f"{servers.prefect_url}/v2/artifacts/artifact/{latest[f'{key}-{name}']}"
        return Page(f"prefect-{name}", url, (f"of run {run.name} ({run.run_id})", *texts), links)

    newest = max(sets, key=lambda one: one.step)
    sampled = f"Step {newest.step}: {newest.episodes} episodes sampled by {newest.sampled_by}"
    reward = f"{final.metrics['reward_mean']:.4g}"
    model = f"{servers.mlflow_url}/#/models/policy.{final.policy_name}"
    return [
        Page(
            "prefect-run",
            f"{flow_run}?tab=TaskRuns",
            (run.name, "Completed", *phases, f"refresh-sampler[{final.number}]"),
        ),
        Page("prefect-artifacts", f"{flow_run}?tab=Artifacts", artifacts),
        artifact("metrics", "reward_mean", "loss", final.ref, reward),
        artifact("episodes", sampled, newest.digest[:12], f"s{newest.step:05d}-g0-m0"),
        artifact("lineage", final.ref, "evaluation of base", run.config_digest, links=(model,)),
        artifact("progress", "100%"),
        Page(
            "prefect-deployments",
            f"{servers.prefect_url}/v2/deployments",
            ("quickstart train-rl Ready", "tiny-rl warm-up-then-rl Ready", "sft", "evaluate", "At 02:00 AM"),
        ),
    ]


def _mlflow(servers: Servers, run: Run, final: PolicyVersion, sets: list[TrajectorySet]) -> list[Page]:
    api, model = f"{servers.mlflow_url}/api/2.0/mlflow", f"policy.{final.policy_name}"
    alias = urllib.parse.urlencode({"name": model, "alias": final.number})
    number = _json(f"{api}/registered-models/alias?{alias}")["model_version"]["version"]
    info = _json(f"{api}/runs/get?run_id={run.mlflow_run_id}")["run"]["info"]
    page = f"{servers.mlflow_url}/#/experiments/{info['experiment_id']}/runs/{run.mlflow_run_id}"
    view = "?workflowType=machine_learning"
    names = {f"{run.name}/train/step-{one.step:05d}": one.digest[:32] for one in sets}
    traces = sum(min(one.episodes, run.config["record"]["trace_episodes"]) for one in sets)
    trained_on = next(one for one in sets if one.step == final.step)
    prefect = f"{servers.prefect_url}/runs/flow-run/{run.flow_run_id}"
    return [
        Page(
            "mlflow-model",
            f"{servers.mlflow_url}/#/models/{model}{view}",
            (model, f"Version {number}", f"@ {final.number}", "@ rollout", "ot.alias.latest"),
        ),
        Page(
            "mlflow-version",
            f"{servers.mlflow_url}/#/models/{model}/versions/{number}{view}",
            (
                *(f"Version {number}", f"@ {final.number}", final.ref, f"parent: {final.parent}"),
                *(
                    "Trained on",
                    trained_on.digest[:12],
                    trained_on.uri,
                    f"sampled by {trained_on.sampled_by}",
                ),
                *("ot.snapshot_uri", final.sampler.uri, "ot.digest", final.sampler.digest),
            ),
            links=(prefect,),
        ),
        Page(
            "mlflow-run",
            f"{page}{view}",
            (run.name, "Finished", "reward_mean", f"{run.name}/", model),
            links=(prefect,),
        ),
        Page(
            "mlflow-datasets",
            f"{page}{view}",
            (f"{run.name}/",),
            click=f"//span[starts-with(., '{run.name}/')]",
            revealed=("datasets used", "episodes:", *names, *names.values()),
        ),
        Page("mlflow-traces", f"{page}/traces{view}", ("Request", "reward", f"{traces} of {traces}")),
    ]


def _json(url: str, body: dict[str, Any] | None = None) -> Any:
    """What an API answers to GET, or to POST with a body."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        return json.load(answer)


def look(driver: WebDriver, page: Page, out: Path, settle_s: float = SETTLE_S) -> Path:
    """Open `page`, wait until it shows what it must, and take its picture.

    Raises:
        PageError: it does not; the picture is taken all the same.
    """
    picture = out / f"{page.name}.png"
    try:
        driver.get(page.url)
        _wait(driver, page, page.texts, page.links)
        if page.click:
            driver.find_elements(By.XPATH, page.click)[0].click()
            _wait(driver, page, page.revealed)
        time.sleep(settle_s)
    finally:
        driver.save_screenshot(str(picture))
        with Image.open(picture) as image:  # few colours: a palette makes it a third of the size
            image.convert("RGB").quantize(128).save(picture, optimize=True)
    return picture


def _wait(driver: WebDriver, page: Page, texts: tuple[str, ...], links: tuple[str, ...] = ()) -> None:
    deadline = time.monotonic() + PAGE_TIMEOUT_S
    while True:
        try:
            shown = " ".join(driver.find_element(By.TAG_NAME, "body").text.split())
            targets = driver.execute_script("return [...document.links].map(link => link.href)")
        except StaleElementReferenceException:  # the page is being built
            shown, targets = "", []
        missing = [text for text in texts if text not in shown] + [one for one in links if one not in targets]
        if not missing:
            return
        if time.monotonic() > deadline:
            raise PageError(f"{page.name} ({driver.current_url}) does not show {missing}; it shows: {shown}")
        time.sleep(0.2)


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the pictures")
    parser.add_argument("--home", type=Path, help="an installation's home; default: a temporary one")
    parser.add_argument("--run", help="a completed run of that home; default: a small one is trained")
    arguments = parser.parse_args()
    programs = find_browser()
    if programs is None:
        print("chromium and chromedriver are needed (Debian: chromium, chromium-driver)", file=sys.stderr)
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory(prefix="opentinker-pages-", ignore_cleanup_errors=True) as temporary:
        home = (arguments.home or Path(temporary)).absolute()
        with served(home) as servers, chromium(programs) as driver:
            for page in pages(servers, arguments.run or trained(home)):
                try:
                    print(look(driver, page, arguments.out), flush=True)
                except PageError as error:
                    failed = True
                    print(error, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

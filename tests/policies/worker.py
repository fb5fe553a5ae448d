"""Another process at the catalog, for tests of races and of death in the middle.

    python -m tests.policies.worker URL TENANT open
    python -m tests.policies.worker URL TENANT publish RUN STEPS
    python -m tests.policies.worker URL TENANT die RUN STEP

Prints `ready` and waits for a line on stdin; then `publish` prints the numbers that it published.
`die` publishes too, but prints `stopped` before its transaction ends and waits to be killed.
"""

import sys
import time
from typing import Any

import alembic.command  # noqa: F401  here, so that all workers open the catalog at the same moment
from sqlalchemy.orm import Session

from opentinker_core.policies.catalog import Catalog
from tests.policies.builders import publish


class Stopping(Catalog):
    """Stops where everything is written and nothing is committed."""

    def _emit(self, session: Session, kind: str, payload: dict[str, Any]) -> None:
        super()._emit(session, kind, payload)
        session.flush()
        print("stopped", flush=True)
        time.sleep(600)


def main(url: str, tenant: str, action: str, run_id: str = "", steps: str = "0") -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    catalog = Stopping(url, tenant) if action == "die" else Catalog(url, tenant)
    if action == "open":
        print(len(catalog.policies()), flush=True)
        return
    run = catalog.run(run_id)
    if action == "die":
        publish(catalog, run, int(steps))
    print(*(publish(catalog, run, step).number for step in range(int(steps))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

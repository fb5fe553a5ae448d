"""A process that is killed while its sandbox is in use: it says the number of the process inside."""

import sys
from threading import Thread

import psutil

from opentinker_core.agents.tools.protocol import Deadline
from opentinker_core.agents.tools.sandbox import PythonTool, SandboxSettings
from tests.waiting import PATIENCE_S, wait_until


def main() -> None:
    """Start an endless program, and say which process it is."""
    with PythonTool(SandboxSettings(seconds=PATIENCE_S)) as tool:
        code = {"code": "import time\ntime.sleep(10**6)"}
        Thread(target=tool.call, args=(code, Deadline.after(PATIENCE_S)), daemon=True).start()
        wait_until(psutil.Process().children, "the process inside")
        print(psutil.Process().children()[0].pid, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()

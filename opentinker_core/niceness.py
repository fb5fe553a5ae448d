"""How a process of a session of its own gives way to those of others.

Where Linux groups processes by session (`kernel.sched_autogroup_enabled`, the default of many machines), the
sessions share the cores equally, whatever the niceness of their processes: niceness orders those of one
session alone, and the session has one of its own (sched(7)).
"""

from contextlib import suppress
from pathlib import Path


def set_session_nice(nice: int, process: int | None = None) -> None:
    """Give the session of a process (None: this one) a niceness, where there is such a thing.

    Args:
        nice: 0 to 19.
    """
    with suppress(OSError):  # no autogroups here, or not permitted
        Path(f"/proc/{process or 'self'}/autogroup").write_text(str(nice), encoding="ascii")

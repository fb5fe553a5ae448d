"""Names that users choose (policies, runs, tenants, aliases) and that end up in paths and URLs."""

import re

from opentinker_core.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"


def check_name(field: str, value: str) -> str:
    """Return `value` if it is a safe name.

    Raises:
        UsageError: the name is empty, too long, or could be read as a path, URL or reference.
    """
    if not isinstance(value, str) or not _NAME.match(value):
        raise UsageError(f"{field}: {value!r:.80} is not a name; accepted: {NAME_RULE}")
    return value

"""The two errors a user can meet: a request that is wrong, and a request that failed.

The command line turns `UsageError` into exit code 2 and every other `OpenTinkerError` into exit
code 1, each as one message without a traceback. Anything else that escapes is a defect.
"""


class OpenTinkerError(Exception):
    """An operation failed for a reason the user can understand and act on."""


class UsageError(OpenTinkerError):
    """The request itself is wrong: the message names the field, the value and what is accepted."""


class NotFoundError(UsageError):
    """The thing that was named does not exist (or belongs to another tenant)."""

"""The service's objects in the database, by (tenant, id): another tenant's do not exist."""

from opentinker_core.service.checkpoint_records import CheckpointRecords, ResultRecords
from opentinker_core.service.session_records import ModelRecords, SessionRecords
from opentinker_core.service.usage_records import UsageRecords


class Records(SessionRecords, ModelRecords, CheckpointRecords, ResultRecords, UsageRecords):
    """See the module. Every method is one transaction; safe to share between threads.

    `NotFoundError` is raised for what does not exist and for what is another tenant's, with one message.
    """

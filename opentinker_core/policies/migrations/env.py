"""Alembic's environment: migrates over the connection that `policies/database.py` hands in."""

from alembic import context

from opentinker_core.policies.database import VERSION_TABLE
from opentinker_core.policies.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()

"""The server of each session: several may share a database. Sessions from before have ended."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    server = sa.Column("server", sa.String(length=32), nullable=False, server_default="")
    op.add_column("ot_sessions", server)
    op.execute("UPDATE ot_sessions SET status = 'expired' WHERE status = 'live'")
    op.execute("UPDATE ot_models SET status = 'lost' WHERE status = 'live'")

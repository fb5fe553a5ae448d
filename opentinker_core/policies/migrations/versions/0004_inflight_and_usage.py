"""Samplers whose version changes (which model's inflight saves they follow), and usage by the hour."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("ot_samplers", sa.Column("inflight_of", sa.String(length=63), nullable=True))
    op.create_index("ix_ot_samplers_inflight_of", "ot_samplers", ["inflight_of"])
    op.create_table(
        "ot_usage",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("hour", sa.DateTime(timezone=True), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_ot_usage"),
        sa.UniqueConstraint(
            "tenant",
            "hour",
            "kind",
            "base_model",
            "session_id",
            name="uq_ot_usage_tenant_hour_kind_base_model_session_id",
        ),
    )

"""What the service keeps: sessions, models, samplers, named checkpoints, results of futures."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ot_sessions",
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("sdk_version", sa.String(), nullable=False),
        sa.Column("project_id", sa.String(), nullable=True),
        sa.Column("display_name", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("detail", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("session_id", name="pk_ot_sessions"),
    )
    op.create_index("ix_ot_sessions_tenant_created_at", "ot_sessions", ["tenant", "created_at"])
    op.create_index("ix_ot_sessions_status", "ot_sessions", ["status"])
    op.create_table(
        "ot_models",
        sa.Column("model_id", sa.String(length=63), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("used_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["ot_sessions.session_id"], name="fk_ot_models_session_id"),
        sa.ForeignKeyConstraint(["policy_id"], ["ot_policies.policy_id"], name="fk_ot_models_policy_id"),
        sa.ForeignKeyConstraint(["run_id"], ["ot_runs.run_id"], name="fk_ot_models_run_id"),
        sa.PrimaryKeyConstraint("model_id", name="pk_ot_models"),
    )
    op.create_index("ix_ot_models_tenant_created_at", "ot_models", ["tenant", "created_at"])
    op.create_index("ix_ot_models_session_id", "ot_models", ["session_id"])
    op.create_table(
        "ot_samplers",
        sa.Column("sampler_id", sa.String(length=63), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("model_path", sa.String(), nullable=True),
        sa.Column("policy_id", sa.String(length=32), nullable=True),
        sa.Column("number", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["session_id"], ["ot_sessions.session_id"], name="fk_ot_samplers_session_id"),
        sa.ForeignKeyConstraint(
            ["policy_id", "number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_samplers_policy_id_number",
        ),
        sa.PrimaryKeyConstraint("sampler_id", name="pk_ot_samplers"),
    )
    op.create_index("ix_ot_samplers_session_id", "ot_samplers", ["session_id"])
    op.create_table(
        "ot_checkpoints",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("model_id", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("user_metadata", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(["model_id"], ["ot_models.model_id"], name="fk_ot_checkpoints_model_id"),
        sa.ForeignKeyConstraint(
            ["policy_id", "number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_checkpoints_policy_id_number",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_ot_checkpoints"),
        sa.UniqueConstraint("model_id", "kind", "name", name="uq_ot_checkpoints_model_id_kind_name"),
    )
    op.create_index("ix_ot_checkpoints_tenant_created_at", "ot_checkpoints", ["tenant", "created_at"])
    op.create_index("ix_ot_checkpoints_policy_id_number", "ot_checkpoints", ["policy_id", "number"])
    op.create_index("ix_ot_checkpoints_expires_at", "ot_checkpoints", ["expires_at"])
    op.create_table(
        "ot_futures",
        sa.Column("request_id", sa.String(length=127), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("session_id", sa.String(length=32), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("media_type", sa.String(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_ot_futures"),
    )
    op.create_index("ix_ot_futures_created_at", "ot_futures", ["created_at"])
    op.create_index("ix_ot_futures_session_id", "ot_futures", ["session_id"])

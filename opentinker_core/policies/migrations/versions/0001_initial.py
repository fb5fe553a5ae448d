"""The first schema: policies, versions, aliases, runs, trajectory sets, evaluations, outbox."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "ot_outbox",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("delivered_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("last_error", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_ot_outbox"),
    )
    op.create_index("ix_ot_outbox_tenant_delivered_at_id", "ot_outbox", ["tenant", "delivered_at", "id"])
    op.create_table(
        "ot_policies",
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("base_model", sa.String(), nullable=False),
        sa.Column("lora", sa.JSON(), nullable=False),
        sa.Column("forked_from", sa.String(), nullable=True),
        sa.Column("next_number", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("policy_id", name="pk_ot_policies"),
        sa.UniqueConstraint("tenant", "name", name="uq_ot_policies_tenant_name"),
    )
    op.create_table(
        "ot_runs",
        sa.Column("run_id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("name", sa.String(length=63), nullable=False),
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("config_digest", sa.String(), nullable=False),
        sa.Column("code_commit", sa.String(), nullable=True),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("flow_run_id", sa.String(), nullable=True),
        sa.Column("mlflow_run_id", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["policy_id"], ["ot_policies.policy_id"], name="fk_ot_runs_policy_id"),
        sa.PrimaryKeyConstraint("run_id", name="pk_ot_runs"),
        sa.UniqueConstraint("tenant", "flow_run_id", name="uq_ot_runs_tenant_flow_run_id"),
    )
    op.create_index("ix_ot_runs_tenant_name_created_at", "ot_runs", ["tenant", "name", "created_at"])
    op.create_table(
        "ot_version_numbers",
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("run_id", sa.String(length=32), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id"], ["ot_policies.policy_id"], name="fk_ot_version_numbers_policy_id"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["ot_runs.run_id"], name="fk_ot_version_numbers_run_id"),
        sa.PrimaryKeyConstraint("policy_id", "number", name="pk_ot_version_numbers"),
        sa.UniqueConstraint(
            "policy_id", "run_id", "step", name="uq_ot_version_numbers_policy_id_run_id_step"
        ),
    )
    op.create_table(
        "ot_versions",
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sampler_uri", sa.String(), nullable=False),
        sa.Column("sampler_digest", sa.String(), nullable=False),
        sa.Column("sampler_size", sa.BigInteger(), nullable=False),
        sa.Column("checkpoint_uri", sa.String(), nullable=True),
        sa.Column("checkpoint_digest", sa.String(), nullable=True),
        sa.Column("checkpoint_size", sa.BigInteger(), nullable=True),
        sa.Column("parent_policy_id", sa.String(length=32), nullable=True),
        sa.Column("parent_number", sa.Integer(), nullable=True),
        sa.Column("run_id", sa.String(length=32), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["parent_policy_id", "parent_number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_versions_parent_policy_id_parent_number",
        ),
        sa.ForeignKeyConstraint(
            ["policy_id", "number"],
            ["ot_version_numbers.policy_id", "ot_version_numbers.number"],
            name="fk_ot_versions_policy_id_number",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["ot_runs.run_id"], name="fk_ot_versions_run_id"),
        sa.PrimaryKeyConstraint("policy_id", "number", name="pk_ot_versions"),
    )
    op.create_index("ix_ot_versions_checkpoint_uri", "ot_versions", ["checkpoint_uri"])
    op.create_index("ix_ot_versions_run_id", "ot_versions", ["run_id"])
    op.create_table(
        "ot_aliases",
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("alias", sa.String(length=63), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id", "number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_aliases_policy_id_number",
        ),
        sa.PrimaryKeyConstraint("policy_id", "alias", name="pk_ot_aliases"),
    )
    op.create_table(
        "ot_trajectory_sets",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("set_id", sa.String(), nullable=False),
        sa.Column("uri", sa.String(), nullable=False),
        sa.Column("digest", sa.String(), nullable=False),
        sa.Column("episodes", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("environment", sa.String(), nullable=False),
        sa.Column("sampled_by", sa.String(), nullable=False),
        sa.Column("sampled_policy_id", sa.String(length=32), nullable=True),
        sa.Column("sampled_number", sa.Integer(), nullable=True),
        sa.Column("run_id", sa.String(length=32), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("purpose", sa.String(), nullable=False),
        sa.Column("reward_mean", sa.Double(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["ot_runs.run_id"], name="fk_ot_trajectory_sets_run_id"),
        sa.ForeignKeyConstraint(
            ["sampled_policy_id", "sampled_number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_trajectory_sets_sampled_policy_id_sampled_number",
        ),
        sa.PrimaryKeyConstraint("id", name="pk_ot_trajectory_sets"),
        sa.UniqueConstraint(
            "run_id",
            "step",
            "purpose",
            "sampled_by",
            name="uq_ot_trajectory_sets_run_id_step_purpose_sampled_by",
        ),
        sa.UniqueConstraint("tenant", "set_id", name="uq_ot_trajectory_sets_tenant_set_id"),
    )
    op.create_index(
        "ix_ot_trajectory_sets_sampled_policy_id_sampled_number",
        "ot_trajectory_sets",
        ["sampled_policy_id", "sampled_number"],
    )
    op.create_table(
        "ot_evaluations",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(length=63), nullable=False),
        sa.Column("subject", sa.String(), nullable=False),
        sa.Column("subject_policy_id", sa.String(length=32), nullable=True),
        sa.Column("subject_number", sa.Integer(), nullable=True),
        sa.Column("run_id", sa.String(length=32), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("environment", sa.String(), nullable=False),
        sa.Column("mean", sa.Double(), nullable=False),
        sa.Column("low", sa.Double(), nullable=False),
        sa.Column("high", sa.Double(), nullable=False),
        sa.Column("episodes", sa.Integer(), nullable=False),
        sa.Column("trajectory_set", sa.Integer(), nullable=True),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["ot_runs.run_id"], name="fk_ot_evaluations_run_id"),
        sa.ForeignKeyConstraint(
            ["subject_policy_id", "subject_number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_evaluations_subject_policy_id_subject_number",
        ),
        sa.ForeignKeyConstraint(
            ["trajectory_set"], ["ot_trajectory_sets.id"], name="fk_ot_evaluations_trajectory_set"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_ot_evaluations"),
        sa.UniqueConstraint(
            "run_id", "subject", "environment", name="uq_ot_evaluations_run_id_subject_environment"
        ),
    )
    op.create_index("ix_ot_evaluations_tenant_subject", "ot_evaluations", ["tenant", "subject"])
    op.create_table(
        "ot_trained_on",
        sa.Column("policy_id", sa.String(length=32), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("trajectory_set", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["policy_id", "number"],
            ["ot_versions.policy_id", "ot_versions.number"],
            name="fk_ot_trained_on_policy_id_number",
        ),
        sa.ForeignKeyConstraint(
            ["trajectory_set"], ["ot_trajectory_sets.id"], name="fk_ot_trained_on_trajectory_set"
        ),
        sa.PrimaryKeyConstraint("policy_id", "number", "trajectory_set", name="pk_ot_trained_on"),
    )
    op.create_index("ix_ot_trained_on_trajectory_set", "ot_trained_on", ["trajectory_set"])

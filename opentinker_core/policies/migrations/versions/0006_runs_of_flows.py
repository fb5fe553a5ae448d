"""A flow run may train several policies together: it has one run of each."""

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("ot_runs") as runs:
        runs.drop_constraint("uq_ot_runs_tenant_flow_run_id", type_="unique")
        runs.create_unique_constraint(
            "uq_ot_runs_tenant_flow_run_id_policy_id", ["tenant", "flow_run_id", "policy_id"]
        )

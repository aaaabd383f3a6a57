"""Jobs learn how far they ever got, how long they may take, and that they should stop; the queue, that it is paused."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Added in place: SQLite's way of changing a table otherwise is to drop it, and all its runs with it.
    op.add_column("job", sa.Column("furthest", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("job", sa.Column("timeout", sa.Float(), nullable=True))
    op.add_column("job", sa.Column("stop", sa.String(length=16), nullable=True))
    op.drop_index("ix_job_status_priority_id", "job")
    op.create_index("ix_job_status_priority_id", "job", ["status", sa.text("priority DESC"), "id"])
    op.create_table(
        "setting",
        sa.Column("name", sa.String(length=50), nullable=False),
        sa.Column("value", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_setting")),
    )

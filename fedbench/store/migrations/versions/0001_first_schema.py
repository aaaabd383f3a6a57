"""The first schema: sweeps, jobs, runs, evaluations, metrics, histograms, costs."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "job",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("worker", sa.String(length=200), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job")),
        sa.UniqueConstraint("key", name=op.f("uq_job_key")),
    )
    op.create_index(op.f("ix_job_status_priority_id"), "job", ["status", "priority", "id"], unique=False)
    op.create_table(
        "sweep",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("grid", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweep")),
        sa.UniqueConstraint("name", name=op.f("uq_sweep_name")),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("device", sa.String(length=50), nullable=False),
        sa.Column("host", sa.String(length=200), nullable=False),
        sa.Column("commit", sa.String(length=64), nullable=True),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("split_hash", sa.String(length=64), nullable=True),
        sa.Column("started", sa.Float(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("last_round", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_run_job_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
    )
    op.create_index(op.f("ix_run_job_id"), "run", ["job_id"], unique=False)
    op.create_table(
        "sweep_job",
        sa.Column("sweep_id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["job.id"], name=op.f("fk_sweep_job_job_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["sweep_id"], ["sweep.id"], name=op.f("fk_sweep_job_sweep_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("sweep_id", "job_id", name=op.f("pk_sweep_job")),
    )
    op.create_table(
        "cost",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("client", sa.Integer(), nullable=True),
        sa.Column("phase", sa.String(length=16), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("bytes_down", sa.BigInteger(), nullable=False),
        sa.Column("bytes_up", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_cost_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_cost")),
    )
    op.create_index(op.f("ix_cost_run_id"), "cost", ["run_id"], unique=False)
    op.create_table(
        "evaluation",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("recorded", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("stage", sa.String(length=16), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("view", sa.String(length=8), nullable=False),
        sa.Column("split", sa.String(length=50), nullable=False),
        sa.Column("predict", sa.String(length=8), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_evaluation_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluation")),
        sa.UniqueConstraint(
            "run_id",
            "stage",
            "round",
            "step",
            "view",
            "split",
            "predict",
            name=op.f("uq_evaluation_run_id_stage_round_step_view_split_predict"),
        ),
    )
    op.create_table(
        "histogram",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("evaluation_id", sa.Integer(), nullable=False),
        sa.Column("client", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("bin", sa.Integer(), nullable=False),
        sa.Column("count", sa.Float(), nullable=False),
        sa.Column("confidence", sa.Float(), nullable=False),
        sa.Column("correct", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluation.id"], name=op.f("fk_histogram_evaluation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_histogram")),
    )
    op.create_index(op.f("ix_histogram_evaluation_id"), "histogram", ["evaluation_id"], unique=False)
    op.create_table(
        "metric",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("evaluation_id", sa.Integer(), nullable=False),
        sa.Column("client", sa.Integer(), nullable=True),
        sa.Column("name", sa.String(length=50), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluation.id"], name=op.f("fk_metric_evaluation_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_metric")),
    )
    op.create_index(op.f("ix_metric_evaluation_id"), "metric", ["evaluation_id"], unique=False)

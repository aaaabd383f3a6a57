"""The schema, as SQLAlchemy models. Changing it means adding a migration in `migrations/versions`."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, MetaData, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    # Named constraints, so that later migrations can find them on every database.
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Sweep(Base):
    """A grid that was enqueued."""

    __tablename__ = "sweep"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    grid: Mapped[dict[str, Any]] = mapped_column(JSON)


class Job(Base):
    """A job and its place in the queue. Times are seconds since 1970 by the database's clock."""

    __tablename__ = "job"
    id: Mapped[int] = mapped_column(primary_key=True)
    key: Mapped[str] = mapped_column(String(64), unique=True)
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    status: Mapped[str] = mapped_column(String(16), default="pending")
    priority: Mapped[int] = mapped_column(default=0)
    attempts: Mapped[int] = mapped_column(default=0)
    """How often it was begun since it last got further than ever before."""
    furthest: Mapped[int] = mapped_column(default=0, server_default="0")
    """The last round that any attempt has recorded."""
    timeout: Mapped[float | None] = mapped_column(Float)
    """Seconds that one attempt may take."""
    stop: Mapped[str | None] = mapped_column(String(16))
    """What the worker that has it is asked for: `cancel`."""
    worker: Mapped[str | None] = mapped_column(String(200))
    lease_until: Mapped[float | None] = mapped_column(Float)
    # in the order of claims, so that the next job is the first entry; else every claim sorts all that wait
    __table_args__ = (Index("ix_job_status_priority_id", "status", priority.desc(), "id"),)


class Setting(Base):
    """What holds for the queue as a whole, on every machine: there is a row `paused` while nothing may run."""

    __tablename__ = "setting"
    name: Mapped[str] = mapped_column(String(50), primary_key=True)
    value: Mapped[str] = mapped_column(String(200))


class SweepJob(Base):
    """Which jobs a sweep asked for; sweeps share jobs."""

    __tablename__ = "sweep_job"
    sweep_id: Mapped[int] = mapped_column(ForeignKey("sweep.id", ondelete="CASCADE"), primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), primary_key=True)


class Run(Base):
    """One execution of a job: where, when, with which versions."""

    __tablename__ = "run"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int] = mapped_column(ForeignKey("job.id", ondelete="CASCADE"), index=True)
    status: Mapped[str] = mapped_column(String(16))
    device: Mapped[str] = mapped_column(String(50))
    host: Mapped[str] = mapped_column(String(200))
    commit: Mapped[str | None] = mapped_column(String(64))
    versions: Mapped[dict[str, Any]] = mapped_column(JSON)
    split_hash: Mapped[str | None] = mapped_column(String(64))
    started: Mapped[float] = mapped_column(Float)
    seconds: Mapped[float | None] = mapped_column(Float)
    last_round: Mapped[int] = mapped_column(default=0)
    error: Mapped[str | None] = mapped_column(Text)


class Evaluation(Base):
    """A state of a run, scored on a split under a view."""

    __tablename__ = "evaluation"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"))
    recorded: Mapped[int]
    """The round in which it was made: a resumed run forgets what is later than its checkpoint."""
    round: Mapped[int]
    """The round whose state was scored; earlier than `recorded` for the best state."""
    stage: Mapped[str] = mapped_column(String(16))
    step: Mapped[int] = mapped_column(default=0)
    view: Mapped[str] = mapped_column(String(8))
    split: Mapped[str] = mapped_column(String(50))
    predict: Mapped[str] = mapped_column(String(8))
    __table_args__ = (UniqueConstraint("run_id", "stage", "round", "step", "view", "split", "predict"),)


class Metric(Base):
    """One figure of an evaluation, as a fraction; client NULL is all clients pooled."""

    __tablename__ = "metric"
    id: Mapped[int] = mapped_column(primary_key=True)
    evaluation_id: Mapped[int] = mapped_column(ForeignKey("evaluation.id", ondelete="CASCADE"), index=True)
    client: Mapped[int | None]
    name: Mapped[str] = mapped_column(String(50))
    value: Mapped[float] = mapped_column(Float)


class Histogram(Base):
    """One bin of a reliability diagram or an entropy histogram: sums that merge."""

    __tablename__ = "histogram"
    id: Mapped[int] = mapped_column(primary_key=True)
    evaluation_id: Mapped[int] = mapped_column(ForeignKey("evaluation.id", ondelete="CASCADE"), index=True)
    client: Mapped[int | None]
    kind: Mapped[str] = mapped_column(String(16))
    bin: Mapped[int]
    count: Mapped[float] = mapped_column(Float)
    confidence: Mapped[float] = mapped_column(Float)
    correct: Mapped[float] = mapped_column(Float)


class Cost(Base):
    """Seconds and bytes of one phase of one round; `count` operations took the seconds."""

    __tablename__ = "cost"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id", ondelete="CASCADE"), index=True)
    round: Mapped[int]
    client: Mapped[int | None]
    phase: Mapped[str] = mapped_column(String(16))
    seconds: Mapped[float] = mapped_column(Float)
    count: Mapped[int]
    bytes_down: Mapped[int] = mapped_column(BigInteger)
    bytes_up: Mapped[int] = mapped_column(BigInteger)

"""Runs migrations on the connection, and inside the transaction, that `fedbench.store.database` gives."""

from alembic import context

from fedbench.store.models import Base

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Base.metadata, render_as_batch=True
)
context.run_migrations()

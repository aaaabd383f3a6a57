"""Runs migrations on the database that `fedbench.store.database` names."""

from alembic import context
from sqlalchemy import create_engine

from fedbench.store.models import Base

engine = create_engine(context.config.attributes["url"])
with engine.begin() as connection:
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()
engine.dispose()

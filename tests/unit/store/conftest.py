"""A claimed job for the store's tests."""

import pytest

from fedbench import queue


@pytest.fixture
def claim(engine, make_job):
    """Enqueues a job, unless it is there, and claims the next one for a worker."""

    def take(worker="me", **settings):
        queue.enqueue(engine, "sweep", {}, [make_job(**settings)])
        return queue.claim(engine, worker)

    return take

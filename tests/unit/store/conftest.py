"""The store's tests run on both kinds of database; and a claimed job for them."""

import pytest

from fedbench import queue


@pytest.fixture(params=["sqlite", "postgresql"])
def backend(request):
    return request.param


@pytest.fixture
def claim(engine, make_job):
    """Enqueues a job, unless it is there, and claims the next one for a worker."""

    def take(worker="me", **settings):
        queue.enqueue(engine, "sweep", {}, [make_job(**settings)])
        return queue.claim(engine, worker)

    return take

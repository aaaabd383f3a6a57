"""The queue and the recorder: jobs enqueued, claimed and finished per second, and what recording adds to a run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from sqlalchemy import Engine

from fedbench import queue
from fedbench.grid import Changes, expand, load_grid
from fedbench.job import JobSpec, build_job
from fedbench.records import RoundRecord
from fedbench.store.database import database_url, open_database, writing
from fedbench.store.recorder import DatabaseRecorder

JOBS, PROCESSES, CYCLES = 10_000, 4, 500
ENQUEUE_SECONDS = 5.0
CYCLES_PER_SECOND = 300.0
RECORDING_SHARE = 0.02
ROUNDS = 21


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = open_database(database_url(str(tmp_path / "bench.sqlite")), create=True)
    yield engine
    engine.dispose()


@pytest.fixture(scope="module")
def jobs() -> list[JobSpec]:
    return [build_job({"method": "pfedbayes", "dataset": "digits", "seed": seed}) for seed in range(JOBS)]


def test_ten_thousand_jobs_are_enqueued_in_five_seconds(benchmark, engine, jobs):
    benchmark.pedantic(queue.enqueue, (engine, "many", {}, jobs), rounds=1)

    assert queue.counts(engine) == {"pending": JOBS}
    assert benchmark.stats.stats.max < ENQUEUE_SECONDS


def claim_and_finish(where: str, sweep: int) -> list[int]:
    """All that a worker asks of the queue for a job, many times over: reap, claim, release."""
    engine = open_database(database_url(where), create=False)
    name = queue.worker_name()
    taken = []
    queue.counts(engine)
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(CYCLES):
        queue.reap(engine)
        claim = queue.claim(engine, name, sweep)
        assert claim is not None
        with writing(engine).begin() as connection:
            queue.release(connection, claim.job_id, name, "done")
        taken.append(claim.job_id)
    return taken


def test_four_processes_claim_and_finish_300_jobs_per_second(benchmark, engine, jobs):
    sweep = queue.enqueue(engine, "many", {}, jobs)
    command = [sys.executable, __file__, str(engine.url.database), str(sweep)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(PROCESSES)]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * PROCESSES

    def work() -> list[int]:
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return [job for process in processes for job in json.loads(process.communicate()[0])]

    taken = benchmark.pedantic(work, rounds=1)

    rate = len(taken) / benchmark.stats.stats.max
    benchmark.extra_info["cycles per second"] = round(rate)
    print(f"\n{rate:.0f} claim-and-finish cycles per second from {PROCESSES} processes")
    assert len(set(taken)) == len(taken) == PROCESSES * CYCLES
    assert queue.counts(engine) == {"pending": JOBS - len(taken), "done": len(taken)}
    assert rate >= CYCLES_PER_SECOND


class TimedRecorder(DatabaseRecorder):
    """Adds up the seconds that its records take."""

    spent = 0.0

    def record(self, record: RoundRecord) -> None:
        started = time.perf_counter()
        super().record(record)
        self.spent += time.perf_counter() - started


@pytest.fixture
def like_mnist(add_dataset) -> JobSpec:
    """pFedBayes on MNIST, medium, as its grid has it, on noise of that shape: 10 clients, 1000 + 4000 images each."""
    (job,) = expand(load_grid("pfedbayes_mnist"), Changes(methods="pfedbayes", axes=["size=medium", "seed=0"]))
    labels = np.tile(np.arange(10), 5_000)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 1, 28, 28))
    add_dataset("mnist", images, labels, per_class=(200, 800))
    return job.model_copy(update={"partition_params": {**job.partition_params, "size": "small"}})


def test_recording_is_less_than_two_percent_of_a_run_of_pfedbayes_on_mnist(benchmark, engine, like_mnist, tmp_path):
    import torch

    from fedbench.simulation import Surroundings, simulate

    torch.set_num_threads(1)
    queue.enqueue(engine, "one", {}, [like_mnist])
    claim = queue.claim(engine, "bench")
    recorder = TimedRecorder(engine, claim.job_id, "bench")
    ends: list[tuple[float, float]] = []  # of every round: the time, and what recording has taken so far
    place = Surroundings(
        tmp_path / "checkpoints",
        checkpoint_seconds=1e9,
        should_stop=lambda: len(ends) == ROUNDS,
        progress=lambda round_, accuracy: ends.append((time.perf_counter(), recorder.spent)),
    )

    assert benchmark.pedantic(simulate, (like_mnist, recorder, place), rounds=1) == "interrupted"

    # from the end of round 1 to that of round 21: 20 rounds, two of them with evaluations, as everywhere in the run
    seconds, recording = (ends[-1][part] - ends[0][part] for part in (0, 1))
    share = recording / seconds
    benchmark.extra_info["share of recording"] = round(share, 5)
    print(f"\n{seconds / (ROUNDS - 1):.3f} s per round, {share:.2%} of it for recording")
    assert share < RECORDING_SHARE


if __name__ == "__main__":
    print(json.dumps(claim_and_finish(sys.argv[1], int(sys.argv[2]))))

"""The line between a job on another machine and the driver, without Ray: calls are answered at once."""

import pickle
import socket
import sys
from importlib.util import find_spec

import pytest
from sqlalchemy import select

from fedbench import queue
from fedbench.algorithm import methods
from fedbench.errors import FedbenchError
from fedbench.store.models import Run
from fedbench.store.recorder import DatabaseRecorder, Origin
from fedbench.workers import ray
from fedbench.workers.process import Ended, RoundDone, run_claimed
from fedbench.workers.ray import Needs
from fedbench.workers.remote import Books, Line, RemoteParent, RemoteRecorder, Reply
from fedbench.workers.slots import Slot

FedAvg = methods.get("fedavg")
NODE = Origin("node-7", {"torch": "9.9", "python": "3.99"})


class Driver:
    """Answers calls as the Ray driver does, after both call and reply were pickled, and keeps their names."""

    def __init__(self, engine, claim, folder):
        self.claim = claim
        self.events = []
        self.names = []
        self.stop_after = None
        self.dies_in = None
        self.books = Books(DatabaseRecorder(engine, claim.job_id, "driver"), folder, self.events.append)

    def send(self, name, arguments):
        if name == "record" and arguments[0].round == self.dies_in:
            raise NodeDiesError
        self.names.append(name)
        rounds = [event.round for event in self.events if isinstance(event, RoundDone)]
        stop = self.stop_after is not None and max(rounds, default=0) >= self.stop_after
        try:
            reply = self.books.answer(name, pickle.loads(pickle.dumps(arguments)), stop=stop)
        except queue.LeaseLostError:
            reply = Reply(lost=True)
        return pickle.loads(pickle.dumps(reply))


class NodeDiesError(BaseException):
    """What no code of the job catches, as no code runs on a dead node."""


class Remembering(FedAvg):
    """FedAvg whose clients keep their last model, so that a checkpoint has files of clients."""

    def update(self, down, memory, data, ctx):
        message, _ = super().update(down, memory, data, ctx)
        return message, {f"kept.{name}": value for name, value in message.items()}


@pytest.fixture
def claim_job(engine, make_job, add_method):
    def claim(method=Remembering, **settings):
        add_method("toy", method)
        queue.enqueue(engine, "sweep", {}, [make_job("toy", **{"rounds": 4, "eval_every": 1, **settings})])
        return queue.claim(engine, "driver")

    return claim


@pytest.fixture
def run_on(monkeypatch, tmp_path):
    """Runs the driver's job on a machine with this name, which keeps nothing from before."""
    monkeypatch.setenv("FEDBENCH_CHECKPOINT_SECONDS", "0")

    def run(driver, machine):
        line = Line(driver.send)
        folder = tmp_path / machine
        recorder = RemoteRecorder(line, folder)
        line("arrive", NODE, machine)
        slot = Slot("cpu", "cpu", 1)
        run_claimed(recorder, driver.claim, slot, tmp_path, folder, RemoteParent(line), recorder.send_checkpoints)

    return run


def names_in(folder):
    return sorted(path.name for path in folder.glob("*"))


def runs(engine):
    with engine.connect() as connection:
        return connection.execute(select(Run.status, Run.last_round, Run.host, Run.versions, Run.error)).all()


def test_a_run_is_recorded_under_the_machine_that_it_ran_on(engine, claim_job, run_on, tmp_path):
    driver = Driver(engine, claim_job(), tmp_path / "driver")
    run_on(driver, "node")
    ((status, last, host, versions, _),) = runs(engine)
    assert (status, last, host) == ("done", 4, "node-7")
    assert (versions["torch"], versions["threads"]) == ("9.9", 1)
    assert [event.round for event in driver.events if isinstance(event, RoundDone)] == [1, 2, 3, 4]
    assert driver.events[-1].outcome == "done"
    assert queue.counts(engine) == {"done": 1}
    assert names_in(tmp_path / "driver") == []


def test_a_job_that_is_told_to_stop_leaves_its_whole_checkpoint_with_the_driver(engine, claim_job, run_on, tmp_path):
    driver = Driver(engine, claim_job(), tmp_path / "driver")
    driver.stop_after = 3
    run_on(driver, "node")
    assert (driver.events[-1].outcome, runs(engine)[0].last_round) == ("interrupted", 3)
    # the newest two checkpoints, and what they name: the memories of both clients after rounds 2 and 3
    expected = ["00000002.ckpt", "00000003.ckpt", *(f"client-{c}-{v}.pt" for c in (0, 1) for v in (2, 3))]
    assert names_in(tmp_path / "driver") == expected
    for name in expected:
        assert (tmp_path / "driver" / name).read_bytes() == (tmp_path / "node" / name).read_bytes()
    writes = [name for name in driver.names if name in ("write", "keep")]
    # a checkpoint after rounds 1, 2 and 3, and again on the order to stop: 2 memories and itself, once each;
    # the last one is written again, because it was saved again
    assert writes == ["write"] * 3 + ["keep"] + ["write"] * 3 + ["keep"] + ["write"] * 3 + ["keep", "write", "keep"]


def test_after_the_loss_of_its_machine_a_job_goes_on_elsewhere_with_the_same_bits(
    engine, claim_job, run_on, tmp_path, monkeypatch
):
    trained = []

    class Noting(Remembering):
        def update(self, down, memory, data, ctx):
            trained.append(ctx.round)
            return super().update(down, memory, data, ctx)

    recorded = []
    keep = DatabaseRecorder.record
    monkeypatch.setattr(DatabaseRecorder, "record", lambda self, record: recorded.append(record) or keep(self, record))
    lost = Driver(engine, claim_job(Noting), tmp_path / "driver")
    lost.dies_in = 3
    with pytest.raises(NodeDiesError):
        run_on(lost, "first")
    queue.expire(engine, lost.claim.job_id, "driver")
    assert queue.reap(engine) == 1
    again = Driver(engine, queue.claim(engine, "driver"), tmp_path / "driver")
    run_on(again, "second")
    disturbed = [record.evaluations for record in recorded]
    assert trained == [1, 1, 2, 2, 3, 3, 3, 3, 4, 4]  # two clients each; round 3 twice
    assert [record.round for record in recorded] == [1, 2, 3, 4]
    assert again.events[-1].outcome == "done"

    recorded.clear()
    with engine.begin() as connection:  # the same job once more, from the beginning and undisturbed
        connection.exec_driver_sql("UPDATE job SET status = 'pending'")
    run_on(Driver(engine, queue.claim(engine, "driver"), tmp_path / "undisturbed"), "third")
    assert [record.evaluations for record in recorded] == disturbed


def test_a_new_run_does_not_take_up_the_checkpoint_of_one_that_failed(engine, claim_job, run_on, tmp_path):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "00000002.ckpt").write_bytes(b"of an earlier run")
    driver = Driver(engine, claim_job(rounds=1), tmp_path / "driver")
    run_on(driver, "node")
    assert "read" not in driver.names
    assert driver.events[-1].outcome == "done"


def test_a_failure_on_the_machine_keeps_its_traceback(engine, claim_job, run_on, tmp_path):
    class Fails(FedAvg):
        def update(self, down, memory, data, ctx):
            raise ValueError("no such thing")

    driver = Driver(engine, claim_job(Fails), tmp_path / "driver")
    run_on(driver, "node")
    ((status, _, host, _, error),) = runs(engine)
    assert (status, host) == ("failed", "node-7")
    assert "ValueError: no such thing\nin update, round 1, client 0" in error
    assert driver.events[-1].error == "ValueError: no such thing"


def test_a_task_whose_job_was_put_back_records_no_more(engine, claim_job, run_on, tmp_path):
    claim = claim_job()
    driver = Driver(engine, claim, tmp_path / "driver")
    send = driver.send

    def put_back_in_round_3(name, arguments):
        if name == "record" and arguments[0].round == 3:
            queue.expire(engine, claim.job_id, "driver")
            queue.reap(engine)
            queue.claim(engine, "another")
        return send(name, arguments)

    driver.send = put_back_in_round_3
    run_on(driver, "node")
    assert runs(engine)[0].last_round == 2
    assert queue.listing(engine)[0].worker == "another"


def test_cancelling_reaches_the_machine_with_the_next_record(engine, claim_job, run_on, tmp_path):
    claim = claim_job()
    driver = Driver(engine, claim, tmp_path / "driver")
    send = driver.send

    def cancelled_in_round_2(name, arguments):
        if name == "record" and arguments[0].round == 2:
            queue.cancel(engine, [claim.key])
        return send(name, arguments)

    driver.send = cancelled_in_round_2
    run_on(driver, "node")
    assert isinstance(driver.events[-1], Ended)
    assert (driver.events[-1].outcome, runs(engine)[0].last_round) == ("cancelled", 2)
    assert queue.counts(engine) == {"cancelled": 1}


def test_a_name_from_elsewhere_does_not_leave_the_checkpoints_folder(tmp_path):
    books = Books(None, tmp_path / "driver", print)
    books.write("../escaped.ckpt", b"")
    assert names_in(tmp_path) == ["driver"]


@pytest.mark.parametrize(
    ("needs", "node", "jobs"),
    [
        (Needs(1, 0.0), {"CPU": 4.0}, 4),
        (Needs(3, 0.0), {"CPU": 8.0}, 2),  # 8 // 3
        (Needs(1, 0.0), {"GPU": 2.0}, 0),  # a head without CPUs
        (Needs(1, 1.0), {"CPU": 8.0, "GPU": 2.0}, 2),
        (Needs(1, 0.5), {"CPU": 8.0, "GPU": 2.0}, 4),
        (Needs(1, 0.4), {"CPU": 8.0, "GPU": 2.0}, 4),  # two on each GPU, not 2 / 0.4 = 5
        (Needs(1, 0.1), {"CPU": 64.0, "GPU": 1.0}, 10),
        (Needs(1, 0.5), {"CPU": 3.0, "GPU": 2.0}, 3),
        (Needs(1, 1.0), {"CPU": 8.0}, 0),
    ],
)
def test_a_node_takes_as_many_jobs_as_its_cpus_and_gpus_allow(needs, node, jobs):
    assert needs.fit(node) == jobs


def test_a_job_takes_a_gpu_where_there_are_any_unless_it_is_told_otherwise():
    nodes = [{"CPU": 4.0}, {"CPU": 4.0, "GPU": 1.0}]
    assert Needs().on(nodes).gpus == 1
    assert Needs().on(nodes[:1]).gpus == 0
    assert Needs(gpus=0.0).on(nodes).gpus == 0
    assert Needs(gpus=0.5).on(nodes).gpus == 0.5


def test_jobs_take_threads_and_intervals_from_the_driver_but_neither_data_root_nor_database(monkeypatch):
    for name in ("CHECKPOINT_SECONDS", "MEMORY_GB", "DATA", "DB", "PLUGINS"):
        monkeypatch.setenv(f"FEDBENCH_{name}", "7")
    environment = Needs(cpus=2).environment
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "2"
    ours = {name for name in environment if name.startswith("FEDBENCH_")}
    assert ours == {"FEDBENCH_CHECKPOINT_SECONDS", "FEDBENCH_MEMORY_GB"}
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment
    assert Needs(deterministic=True).environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_the_packed_code_holds_the_package_its_plugins_and_the_users_in_order(tmp_path, monkeypatch):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"method_{name}.py").write_text("")
    monkeypatch.setenv("FEDBENCH_PLUGINS", f"{tmp_path / 'b'}:{tmp_path / 'a'}")
    (tmp_path / "out").mkdir()
    packed = ray.pack(tmp_path / "out")
    for name in ("cli.py", "algorithms/fedavg.py", "datasets/digits.py", "grids/quickstart.yaml", "workers/ray.py"):
        assert (packed / name).is_file(), name
    assert (packed / "shipped_plugins" / "0" / "method_b.py").is_file()
    assert (packed / "shipped_plugins" / "1" / "method_a.py").is_file()
    assert not list(packed.rglob("__pycache__"))


def test_without_ray_there_is_one_message_and_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(FedbenchError) as caught, ray.connected("", Needs(), None, None):
        pass
    assert (caught.value.message, caught.value.hint) == ("Ray is not installed.", "Run: pip install 'fedbench[ray]'")


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_an_address_where_nobody_answers_is_named_at_once():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # but does not listen
        address = f"127.0.0.1:{free.getsockname()[1]}"
        with pytest.raises(FedbenchError) as caught, ray.connected(address, Needs(), None, None):
            pass
    assert caught.value.message.startswith(f"no connection to a Ray cluster at {address}: ")
    assert caught.value.hint == "Start one: ray start --head. See docs/cluster.md."


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_client_is_refused_with_the_way_out():
    with pytest.raises(FedbenchError, match="not over Ray Client"), ray.connected("ray://host:1", Needs(), None, None):
        pass

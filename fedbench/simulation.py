"""The federated loop: poll, select, download, update, aggregate, evaluate, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedbench import checkpoint
from fedbench.algorithm import Algorithm, Cohort, Ctx, Message, State, Upload, methods
from fedbench.closing import adapted, closing, novel
from fedbench.evaluation import VIEWS, Standing
from fedbench.job import JobSpec, canonical_json
from fedbench.memory import RAM_BUDGET, ClientStore, is_whole, remove_unlisted
from fedbench.records import Cost, Evaluation, Phase, Recorder, RoundRecord, View
from fedbench.schedule import in_window, is_evaluated
from fedbench.task import Task
from fedbench.training import backward
from fedbench.wire import on_wire, size_of

Outcome = Literal["done", "diverged", "interrupted"]
CPU = torch.device("cpu")


class DivergedError(Exception):
    """A state or message is no longer finite."""


@dataclass(frozen=True)
class Surroundings:
    """What a run needs from the place where it runs."""

    checkpoints: Path
    device: torch.device = CPU
    data_root: Path | None = None
    checkpoint_seconds: float = 30.0
    memory_budget: int = RAM_BUDGET
    should_stop: Callable[[], bool] = lambda: False
    saved: Callable[[], None] = lambda: None
    """Hears that the checkpoints' folder has changed."""
    progress: Callable[[int, dict[str, float]], None] = lambda round_, accuracy: None


@dataclass
class Best:
    """The best round that a view has seen; the clients' memories of that round are kept in the store."""

    round: int
    score: float
    server: State


@dataclass
class Progress:
    """The whole state of a run between two rounds."""

    round: int
    server: State
    clients: ClientStore
    best: dict[View, Best] = field(default_factory=dict)


@dataclass
class Traffic:
    """Seconds and bytes of one round."""

    poll_seconds: float = 0.0
    polls: int = 0
    client_seconds: float = 0.0
    server_seconds: float = 0.0
    updates: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


def check_jobs(jobs: Iterable[JobSpec], root: Path) -> None:
    """Set up every task and every method on it once, so that a mistake shows before anything runs.

    Raises FedbenchError: missing data, a partition that does not fit, a method that cannot work on the network.
    """

    def task_of(job: JobSpec) -> str:
        return canonical_json([job.task.model_dump(), job.partition_params, job.seed])

    for _, group in groupby(sorted(jobs, key=task_of), key=task_of):
        alike = list(group)
        task = Task(alike[0], device=CPU, root=root)
        for job in alike:
            make_algorithm(job).init_server(Ctx(task, job.protocol, job.seed))


def make_algorithm(job: JobSpec) -> Algorithm:
    """The job's method with its parameters."""
    algorithm = methods.get(job.method)
    return algorithm(algorithm.Params.model_validate(job.params))


def simulate(job: JobSpec, recorder: Recorder, place: Surroundings) -> Outcome:
    """Run a job to its end, from its last checkpoint if there is one. What it measures goes to the recorder."""
    task = Task(job, device=place.device, root=place.data_root)
    algorithm = make_algorithm(job)
    begin = Ctx(task, job.protocol, job.seed)
    recorder.start(rounds=begin.rounds, split_hash=task.split.sha256(), device=str(place.device))
    progress = _resume_or_begin(algorithm, begin, recorder, place)
    _warm_up(task, job.protocol.batch_size)

    saved = time.monotonic()
    while progress.round < begin.rounds:
        if place.should_stop():
            _save(progress, place)
            return "interrupted"
        ctx = replace(begin, round=progress.round + 1)
        try:
            traffic = train_round(algorithm, progress, ctx)
        except DivergedError:
            recorder.record(RoundRecord(ctx.round, [], []))
            return "diverged"
        progress.round = ctx.round
        ledger = _Ledger(ctx, traffic)
        with ledger.timed("predict") as evaluations:
            evaluations += _scheduled(algorithm, progress, ctx)
            _remember_best(progress, evaluations, ctx)
            if ctx.round == ctx.rounds:
                evaluations += closing(*_standings(algorithm, progress, ctx))
        if ctx.round == ctx.rounds:
            with ledger.timed("personalise") as evaluations:
                best, final = _standings(algorithm, progress, ctx)
                evaluations += adapted(best, final) + novel(final)
        if not ledger.is_finite():  # finite weights, but not a finite loss
            recorder.record(RoundRecord(ctx.round, [], []))
            return "diverged"
        recorder.record(RoundRecord(ctx.round, ledger.evaluations, ledger.costs))
        place.progress(ctx.round, ledger.accuracy())
        if time.monotonic() - saved >= place.checkpoint_seconds and ctx.round < ctx.rounds:
            _save(progress, place)
            saved = time.monotonic()
    return "done"


def train_round(algorithm: Algorithm, progress: Progress, ctx: Ctx) -> Traffic:
    """One round of training; changes `progress` and says what it cost. Raises DivergedError."""
    traffic = Traffic()
    server, clients = progress.server, progress.clients
    relayed = server
    downs: dict[int, Message] = {}

    def send(client: int) -> Message:
        if client not in downs:  # a polled client has it already
            downs[client] = on_wire(algorithm.download(relayed, ctx.at(client)))
            traffic.bytes_down += size_of(downs[client])
        return downs[client]

    answers = _poll(algorithm, send, clients, ctx, traffic) if algorithm.polls() else {}
    started = _clock(ctx.task)
    cohort = algorithm.select(server, answers, ctx)
    selecting = _clock(ctx.task) - started

    def uploads() -> Iterator[Upload]:
        nonlocal relayed
        for client in cohort.train:
            down, memory, data = send(client), clients[client], ctx.task.train_data(client)
            ctx.task.net.use_generator(ctx.at(client).rng("dropout"))
            started = _clock(ctx.task)
            with _located("update", ctx, client):
                message, kept = algorithm.update(down, memory, data, ctx.at(client))
            traffic.client_seconds += _clock(ctx.task) - started
            traffic.updates += 1
            downs.pop(client)
            if not (is_finite(message) and is_finite(kept)):
                raise DivergedError
            clients.put(client, kept, ctx.round)
            if client in cohort.report:
                message = on_wire(message)
                traffic.bytes_up += size_of(message)
                upload = Upload(client, data.n, message)
                relayed = algorithm.relay(relayed, upload, ctx)
                yield upload

    started = _clock(ctx.task)
    stream = _pooled(algorithm, server, cohort, ctx, traffic) if algorithm.pooled else uploads()
    with _located("aggregate", ctx, None):
        progress.server = algorithm.aggregate(server, stream, ctx)
    for _ in stream:  # an aggregation need not ask for all uploads; the clients train all the same
        pass
    traffic.server_seconds = selecting + _clock(ctx.task) - started - traffic.client_seconds
    if not is_finite(progress.server):
        raise DivergedError
    return traffic


def _poll(
    algorithm: Algorithm, send: Callable[[int], Message], clients: ClientStore, ctx: Ctx, traffic: Traffic
) -> dict[int, Message]:
    """What every client answers before selection."""
    answers: dict[int, Message] = {}
    for client in ctx.task.members:
        down, memory, data = send(client), clients[client], ctx.task.train_data(client)
        started = _clock(ctx.task)
        with _located("poll", ctx, client):
            answer = algorithm.poll(down, memory, data, ctx.at(client))
        traffic.poll_seconds += _clock(ctx.task) - started
        traffic.polls += 1
        if answer is not None:
            answers[client] = on_wire(answer)
            traffic.bytes_up += size_of(answers[client])
    return answers


def _pooled(algorithm: Algorithm, server: State, cohort: Cohort, ctx: Ctx, traffic: Traffic) -> Iterator[Upload]:
    """The cohort's data as one client's: trained where the server is, so nothing travels."""
    data = ctx.task.train_data(*cohort.train)
    ctx.task.net.use_generator(ctx.rng("dropout"))
    started = _clock(ctx.task)
    with _located("update", ctx, None):
        message, _ = algorithm.update(server, {}, data, ctx)
    traffic.client_seconds += _clock(ctx.task) - started
    traffic.updates += 1
    if not is_finite(message):
        raise DivergedError
    yield Upload(cohort.train[0], data.n, on_wire(message))


def is_finite(state: State) -> bool:
    """No NaN and no infinity in any float tensor. (A sum is finite only if its terms are; overflow counts too.)"""
    return all(_finite_sum(value) for value in state.values() if value.is_floating_point())


def _finite_sum(value: Tensor) -> bool:
    return bool(value.sum().isfinite())


def _scheduled(algorithm: Algorithm, progress: Progress, ctx: Ctx) -> list[Evaluation]:
    """The evaluations of a round: mean prediction on the schedule, MC prediction where it is asked for."""
    now = Standing(algorithm, progress.server, progress.clients, ctx)
    found = []
    if is_evaluated(ctx.round, ctx.protocol):
        found += [now.evaluate(view, "mean") for view in VIEWS]
    if ctx.protocol.mc_every and ctx.round % ctx.protocol.mc_every == 0 and "mc" in now.modes:
        found += [now.evaluate(view, "mc") for view in VIEWS]
    return [evaluation for evaluation in found if evaluation is not None]


def _remember_best(progress: Progress, evaluations: list[Evaluation], ctx: Ctx) -> None:
    """Keep the state of the best round that a best-* rule looks at; of all that were scored under other rules."""
    rule = ctx.protocol.rule
    if rule.startswith("best") and not in_window(ctx.round, rule, ctx.rounds):
        return
    for evaluation in evaluations:
        value = evaluation.metrics[None][ctx.protocol.headline]
        score = -value if ctx.protocol.smaller_wins else value
        best = progress.best.get(evaluation.view)
        if evaluation.predict == "mean" and (best is None or score > best.score):
            progress.best[evaluation.view] = Best(ctx.round, score, progress.server)
            progress.clients.keep(evaluation.view)


def _standings(algorithm: Algorithm, progress: Progress, ctx: Ctx) -> tuple[dict[View, Standing], Standing]:
    """Every view's best state, and the final one."""
    best = {
        view: Standing(algorithm, best.server, progress.clients.kept(view), replace(ctx, round=best.round))
        for view, best in progress.best.items()
    }
    return best, Standing(algorithm, progress.server, progress.clients, ctx)


class _Ledger:
    """What a round adds to the records: its costs, and its evaluations as they are made."""

    def __init__(self, ctx: Ctx, traffic: Traffic) -> None:
        self._ctx = ctx
        self.evaluations: list[Evaluation] = []
        self.costs = [
            Cost(
                ctx.round,
                "client",
                traffic.client_seconds,
                count=traffic.updates,
                bytes_down=traffic.bytes_down,
                bytes_up=traffic.bytes_up,
            ),
            Cost(ctx.round, "server", traffic.server_seconds),
        ]
        if traffic.polls:
            self.costs.append(Cost(ctx.round, "poll", traffic.poll_seconds, count=traffic.polls))

    @contextmanager
    def timed(self, phase: Phase) -> Iterator[list[Evaluation]]:
        """Collects evaluations; their time is the phase's cost."""
        made: list[Evaluation] = []
        started = _clock(self._ctx.task)
        yield made
        if made:
            self.costs.append(Cost(self._ctx.round, phase, _clock(self._ctx.task) - started, count=len(made)))
        self.evaluations += made

    def is_finite(self) -> bool:
        """Whether every figure is a number."""
        figures = [metrics for evaluation in self.evaluations for metrics in evaluation.metrics.values()]
        return all(math.isfinite(value) for metrics in figures for value in metrics.values())

    def accuracy(self) -> dict[str, float]:
        """What the training curve shows at this round, by view; nothing in regression."""
        shown = [e for e in self.evaluations if e.stage == "train" and e.predict == "mean"]
        figures = {evaluation.view: evaluation.metrics[None] for evaluation in shown}
        return {view: metrics["accuracy"] for view, metrics in figures.items() if "accuracy" in metrics}


def _resume_or_begin(algorithm: Algorithm, ctx: Ctx, recorder: Recorder, place: Surroundings) -> Progress:
    """From the newest whole checkpoint that the recorder's rounds reach, else from the beginning."""

    def first_memory(client: int) -> State:
        return algorithm.init_client(ctx.at(client))

    if not recorder.last_round():
        checkpoint.remove(place.checkpoints)  # of an earlier run of this job, which failed
    store = ClientStore(first_memory, place.checkpoints, budget=place.memory_budget, device=place.device)
    content = checkpoint.load_newest(
        place.checkpoints, recorder.last_round(), lambda content: is_whole(place.checkpoints, content["clients"])
    )
    recorder.rewind(0 if content is None else content["round"])
    if content is None:
        return Progress(0, algorithm.init_server(ctx), store)
    store.restore(content["clients"])
    best = {view: Best(**kept) for view, kept in _to_device(content["best"], place.device).items()}
    return Progress(content["round"], _to_device(content["server"], place.device), store, best)


def _save(progress: Progress, place: Surroundings) -> None:
    content = {
        "round": progress.round,
        "server": progress.server,
        "clients": progress.clients.save(),
        "best": {view: vars(best) for view, best in progress.best.items()},
    }
    checkpoint.save(place.checkpoints, progress.round, content)
    remove_unlisted(place.checkpoints, [kept["clients"] for kept in checkpoint.load_all(place.checkpoints)])
    place.saved()


def _to_device(content: Any, device: torch.device) -> Any:
    if isinstance(content, Tensor):
        return content.to(device)
    if isinstance(content, dict):
        return {key: _to_device(value, device) for key, value in content.items()}
    return content


def _warm_up(task: Task, batch_size: int) -> None:
    """The first pass and the first optimiser step set up kernels and modules: no method's cost, so not timed."""
    data = task.train_data(task.members[0])
    index = torch.arange(min(batch_size, data.n))
    task.net.use_generator(torch.Generator(task.device))
    backward(task.net, data.x[index], data.y[index])
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()


def _clock(task: Task) -> float:
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    elif task.device.type == "mps":
        torch.mps.synchronize()
    return time.perf_counter()


class _located:  # noqa: N801 - used like a function
    """Adds to any error in which hook, round and client it arose."""

    def __init__(self, hook: str, ctx: Ctx, client: int | None) -> None:
        self._where = f"in {hook}, round {ctx.round}" + ("" if client is None else f", client {client}")

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, DivergedError):
            error.add_note(self._where)

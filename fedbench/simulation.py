"""The federated loop: poll, select, download, update, aggregate, evaluate, record, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fedbench import checkpoint
from fedbench.algorithm import Algorithm, Ctx, Message, State, Upload, methods, polls, predicts_by_sampling
from fedbench.evaluation import evaluate, in_window, is_evaluated
from fedbench.job import JobSpec
from fedbench.memory import ClientStore
from fedbench.records import Cost, Evaluation, Recorder, RoundRecord, Stage, View
from fedbench.task import Task
from fedbench.training import backward

Outcome = Literal["done", "diverged", "interrupted"]
CPU = torch.device("cpu")
VIEWS: tuple[View, ...] = ("gm", "pm")


class DivergedError(Exception):
    """A state or message is no longer finite."""


@dataclass(frozen=True)
class Surroundings:
    """What a run needs from the place where it runs."""

    checkpoints: Path
    device: torch.device = CPU
    data_root: Path | None = None
    checkpoint_seconds: float = 30.0
    should_stop: Callable[[], bool] = lambda: False
    progress: Callable[[int, dict[str, float]], None] = lambda round_, accuracy: None


@dataclass
class Best:
    """The state of the best round that a view has seen."""

    round: int
    score: float
    server: State
    clients: dict[int, State]


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

    client_seconds: float = 0.0
    server_seconds: float = 0.0
    updates: int = 0
    bytes_down: int = 0
    bytes_up: int = 0


def simulate(job: JobSpec, recorder: Recorder, place: Surroundings) -> Outcome:
    """Run a job to its end, from its last checkpoint if there is one. What it measures goes to the recorder."""
    task = Task(job, device=place.device, root=place.data_root)
    algorithm_class = methods.get(job.method)
    algorithm = algorithm_class(algorithm_class.Params.model_validate(job.params))
    ctx = Ctx(task, job.protocol, job.seed)
    recorder.start(rounds=ctx.rounds, split_hash=task.split.sha256(), device=str(place.device))
    progress = _resume_or_begin(algorithm, ctx, recorder, place)
    _warm_up(task, job.protocol.batch_size)

    saved = time.monotonic()
    while progress.round < ctx.rounds:
        if place.should_stop():
            _save(progress, place)
            return "interrupted"
        now = Ctx(task, job.protocol, job.seed, progress.round + 1)
        try:
            traffic = train_round(algorithm, progress, now)
        except DivergedError:
            recorder.record(RoundRecord(now.round, [], []))
            return "diverged"
        progress.round = now.round
        started = _clock(task)
        evaluations = _scheduled(algorithm, progress, now)
        _remember_best(progress, evaluations, now)
        if now.round == ctx.rounds:
            evaluations += _closing(algorithm, progress, now)
        predict_seconds = _clock(task) - started
        recorder.record(RoundRecord(now.round, evaluations, _costs(now, traffic, evaluations, predict_seconds)))
        place.progress(now.round, {e.view: e.metrics[None]["accuracy"] for e in evaluations if e.predict == "mean"})
        if time.monotonic() - saved >= place.checkpoint_seconds and now.round < ctx.rounds:
            _save(progress, place)
            saved = time.monotonic()
    return "done"


def train_round(algorithm: Algorithm, progress: Progress, ctx: Ctx) -> Traffic:
    """One round of training; changes `progress` and says what it cost. Raises DivergedError."""
    traffic = Traffic()
    server, clients = progress.server, progress.clients
    downs: dict[int, Message] = {}
    answers: dict[int, Message] = {}

    def send(client: int) -> Message:
        if client not in downs:  # a polled client has it already
            downs[client] = on_wire(algorithm.download(server, ctx.at(client)))
            traffic.bytes_down += size_of(downs[client])
        return downs[client]

    if polls(algorithm):
        for client in range(ctx.task.clients):
            with _located("poll", ctx, client):
                answer = algorithm.poll(send(client), clients[client], ctx.task.train_data(client), ctx.at(client))
            if answer is not None:
                answers[client] = on_wire(answer)
                traffic.bytes_up += size_of(answers[client])
    cohort = algorithm.select(server, answers, ctx)

    def uploads() -> Iterator[Upload]:
        for client in cohort.train:
            down, memory, data = send(client), clients[client], ctx.task.train_data(client)
            started = _clock(ctx.task)
            with _located("update", ctx, client):
                message, kept = algorithm.update(down, memory, data, ctx.at(client))
            traffic.client_seconds += _clock(ctx.task) - started
            traffic.updates += 1
            downs.pop(client)
            if not (is_finite(message) and is_finite(kept)):
                raise DivergedError
            clients[client] = kept
            if client in cohort.report:
                message = on_wire(message)
                traffic.bytes_up += size_of(message)
                yield Upload(client, data.n, message)

    started = _clock(ctx.task)
    stream = uploads()
    with _located("aggregate", ctx, None):
        progress.server = algorithm.aggregate(server, stream, ctx)
    for _ in stream:  # an aggregation need not ask for all uploads; the clients train all the same
        pass
    traffic.server_seconds = _clock(ctx.task) - started - traffic.client_seconds
    if not is_finite(progress.server):
        raise DivergedError
    return traffic


def on_wire(message: Message) -> Message:
    """As it travels: floats as float32, integers as int32."""
    return {
        key: value.to(torch.float32 if value.is_floating_point() else torch.int32) for key, value in message.items()
    }


def size_of(message: Message) -> int:
    """Bytes on the wire."""
    return sum(value.numel() * value.element_size() for value in message.values())


def is_finite(state: State) -> bool:
    """No NaN and no infinity in any float tensor. (A sum is finite only if its terms are; overflow counts too.)"""
    return all(_finite_sum(value) for value in state.values() if value.is_floating_point())


def _finite_sum(value: Tensor) -> bool:
    return bool(value.sum().isfinite())


def _scheduled(algorithm: Algorithm, progress: Progress, ctx: Ctx) -> list[Evaluation]:
    """The evaluations of a round: mean prediction on the schedule, MC prediction where it is asked for."""
    found = []
    protocol = ctx.protocol
    if is_evaluated(ctx.round, protocol):
        found += [evaluate(algorithm, progress.server, progress.clients, ctx, view, "mean") for view in VIEWS]
    if protocol.mc_every and ctx.round % protocol.mc_every == 0 and predicts_by_sampling(algorithm):
        found += [evaluate(algorithm, progress.server, progress.clients, ctx, view, "mc") for view in VIEWS]
    return [evaluation for evaluation in found if evaluation is not None]


def _remember_best(progress: Progress, evaluations: list[Evaluation], ctx: Ctx) -> None:
    """Keep the state of the best round of the rule's window; of all rounds for rules that do not look for a best."""
    rule = ctx.protocol.rule
    if rule.startswith("best") and not in_window(ctx.round, ctx.protocol):
        return
    for evaluation in evaluations:
        score = evaluation.metrics[None][ctx.protocol.headline]
        best = progress.best.get(evaluation.view)
        if evaluation.predict == "mean" and (best is None or score > best.score):
            progress.best[evaluation.view] = Best(ctx.round, score, progress.server, progress.clients.snapshot())


def _closing(algorithm: Algorithm, progress: Progress, ctx: Ctx) -> list[Evaluation]:
    """At the end: the best and the final state, per client, by mean and by MC prediction."""
    found = []
    for view in VIEWS:
        if (best := progress.best.get(view)) is None:
            continue
        then = Ctx(ctx.task, ctx.protocol, ctx.seed, best.round)
        states: list[tuple[Stage, Ctx, State, ClientStore]] = [
            ("best", then, best.server, progress.clients.restored(best.clients)),
            ("final", ctx, progress.server, progress.clients),
        ]
        for stage, when, server, clients in states:
            found.append(evaluate(algorithm, server, clients, when, view, "mean", stage=stage, per_client=True))
            if predicts_by_sampling(algorithm):
                found.append(evaluate(algorithm, server, clients, when, view, "mc", stage=stage, per_client=True))
    return [evaluation for evaluation in found if evaluation is not None]


def _costs(ctx: Ctx, traffic: Traffic, evaluations: list[Evaluation], predict_seconds: float) -> list[Cost]:
    costs = [
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
    if evaluations:
        costs.append(Cost(ctx.round, "predict", predict_seconds, count=len(evaluations)))
    return costs


def _resume_or_begin(algorithm: Algorithm, ctx: Ctx, recorder: Recorder, place: Surroundings) -> Progress:
    """From the newest checkpoint that the recorder's rounds reach, else from the beginning."""

    def first_memory(client: int) -> State:
        return algorithm.init_client(ctx.at(client))

    content = checkpoint.load_newest(place.checkpoints, recorder.last_round())
    if content is None:
        recorder.rewind(0)
        return Progress(0, algorithm.init_server(ctx), ClientStore(first_memory))
    recorder.rewind(content["round"])
    content = _to_device(content, place.device)
    best = {view: Best(**kept) for view, kept in content["best"].items()}
    return Progress(content["round"], content["server"], ClientStore(first_memory, content["clients"]), best)


def _save(progress: Progress, place: Surroundings) -> None:
    content = {
        "round": progress.round,
        "server": progress.server,
        "clients": progress.clients.snapshot(),
        "best": {view: vars(best) for view, best in progress.best.items()},
    }
    checkpoint.save(place.checkpoints, progress.round, content)


def _to_device(content: Any, device: torch.device) -> Any:
    if isinstance(content, Tensor):
        return content.to(device)
    if isinstance(content, dict):
        return {key: _to_device(value, device) for key, value in content.items()}
    return content


def _warm_up(task: Task, batch_size: int) -> None:
    """The first pass and the first optimiser step set up kernels and modules: no method's cost, so not timed."""
    data = task.train_data(0)
    index = torch.arange(min(batch_size, data.n))
    backward(task.net, data.x[index], data.y[index])
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0).step()


def _clock(task: Task) -> float:
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
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

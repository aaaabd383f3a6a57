"""What the contract suite knows of single methods, and the means to watch a method at work.

A new method needs one line in LEDGER. MARGINS and SETTINGS are for those that the common values do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, State, Upload, methods
from fedbench.job import JobSpec
from fedbench.simulation import Progress, Surroundings, simulate, train_round


@dataclass(frozen=True)
class Line:
    """Numbers that one client gets and sends in a round, and sends in answer to a poll."""

    down: int
    up: int
    poll: int = 0


LEDGER: dict[str, Callable[[int, int, int], Line]] = {
    # as functions of d, d_b, d_h: parameters of the network, of its body, of its head (specification, section 1.4)
    "bnfed": lambda d, d_b, d_h: Line(d, d + 10),  # its part of the global network; how many samples of each class
    "bpfed": lambda d, d_b, d_h: Line(2 * d_b, 2 * d_b),
    "centralised": lambda d, d_b, d_h: Line(0, 0),
    "cfedbayes": lambda d, d_b, d_h: Line(2 * 2 * d, 2 * d + 1),  # two clusters
    "ditto": lambda d, d_b, d_h: Line(d, d),
    "dsvgd": lambda d, d_b, d_h: Line(6 * d, 6 * d),  # six particles, one client after the other
    "fedabml": lambda d, d_b, d_h: Line(2 * d, 2 * d),
    "fedavg": lambda d, d_b, d_h: Line(d, d),
    "fedbabu": lambda d, d_b, d_h: Line(d_b, d_b),
    "fedbe": lambda d, d_b, d_h: Line(d, d),
    "fedcfl": lambda d, d_b, d_h: Line(d, d),
    "fedem": lambda d, d_b, d_h: Line(3 * d, 3 * d),  # three components
    "fedhb_ensemble": lambda d, d_b, d_h: Line(d_b, d_b),
    # two prototypes and the gate, of which the body is trained
    "fedhb_mixture": lambda d, d_b, d_h: Line(2 * d + d_b, d + d_b),
    "fedhb_niw": lambda d, d_b, d_h: Line(2 * d, d),
    "fedhb_preset": lambda d, d_b, d_h: Line(d_b, d_b),
    "fedpa": lambda d, d_b, d_h: Line(d, d),
    "fedper": lambda d, d_b, d_h: Line(d_b, d_b),
    "fedpop": lambda d, d_b, d_h: Line(d_b, d_b),  # with its default, fixed prior
    "fedprox": lambda d, d_b, d_h: Line(d, d),
    "fedrep": lambda d, d_b, d_h: Line(d_b, d_b),
    "fedsoul_vi": lambda d, d_b, d_h: Line(d_b, d_b),
    "fedsoul_vi_local": lambda d, d_b, d_h: Line(0, d_b),  # the averaged body reaches nobody
    "fesem": lambda d, d_b, d_h: Line(d, d),
    "heurfedamp": lambda d, d_b, d_h: Line(d, d),
    "ifca": lambda d, d_b, d_h: Line(2 * d, d + 1),  # two clusters
    "lgfedavg": lambda d, d_b, d_h: Line(d_h, d_h),  # with one hidden layer its shared part is the head
    "local": lambda d, d_b, d_h: Line(0, 0),
    "perfedavg": lambda d, d_b, d_h: Line(d, d),
    "pfedbayes": lambda d, d_b, d_h: Line(2 * d, 2 * d),
    "pfedgp": lambda d, d_b, d_h: Line(d_b, d_b),
    "pfedme": lambda d, d_b, d_h: Line(d, d),
    "scaffold": lambda d, d_b, d_h: Line(2 * d, 2 * d),
    "sfedbayes": lambda d, d_b, d_h: Line(3 * d, 3 * d),
}

MARGIN = 0.3
"""How much more accurate than an untrained model a method must be after 20 rounds on digits."""
MARGINS: dict[str, float] = dict.fromkeys(
    (
        "bnfed",
        "bpfed",
        "centralised",
        "cfedbayes",
        "ditto",
        "fedavg",
        "fedbe",
        "fedcfl",
        "fedem",
        "fedpa",
        "fedper",
        "fedprox",
        "fedrep",
        "fedsoul_vi",
        "fedsoul_vi_local",
        "fesem",
        "heurfedamp",
        "ifca",
        "lgfedavg",
        "local",
        "perfedavg",
        "pfedbayes",
        "pfedme",
        "scaffold",
        "sfedbayes",
    ),
    0.6,
)
MARGINS["pfedgp"] = 0.0  # its classifiers are the client's data: 82 % are right before anything is trained, 83 % after

SETTINGS: dict[str, dict[str, Any]] = {}
"""Settings without which a method cannot run at all on four clients with five labels each."""

SHORT = {"clients": 4, "f": 0.5, "rounds": 2, "local_unit": "batch", "tau": 3}
WORLDS = {
    "digits": {"dataset": "digits", "model": "dnn100"},
    # batch normalisation, and convolutions that lie channels-last
    "pictures": {"dataset": "pictures", "model": "vgg_s"},
}
NETWORKS = {"bnfed": "mlp3072"}
"""The network on pictures of methods that cannot work on a convolutional one."""


@pytest.fixture(params=methods.names())
def method(request) -> str:
    return request.param


@pytest.fixture
def ledger() -> dict[str, Callable[[int, int, int], Line]]:
    return LEDGER


@pytest.fixture
def margin(method) -> float:
    return MARGINS.get(method, MARGIN)


@pytest.fixture(params=WORLDS)
def world(request, method) -> dict[str, Any]:
    """A data set with a network: settings of a task."""
    if request.param == "digits":
        return WORLDS["digits"]
    request.getfixturevalue("pictures")
    return {**WORLDS["pictures"], "model": NETWORKS.get(method, "vgg_s")}


@pytest.fixture
def short_job(method, make_job) -> Callable[..., JobSpec]:
    """A job of the method with two rounds of three batches, half of four clients taking part."""
    return lambda **settings: make_job(method, **{**SHORT, **SETTINGS.get(method, {}), **settings})


@pytest.fixture
def begin(method, make_ctx, make_algorithm, begin_training) -> Callable[..., tuple[Algorithm, Ctx, Progress]]:
    """The method, its context and its state before the first round of such a job."""

    def make(**settings: Any) -> tuple[Algorithm, Ctx, Progress]:
        ctx = make_ctx(method, round_=0, **{**SHORT, **SETTINGS.get(method, {}), **settings})
        algorithm = make_algorithm(method)
        return algorithm, ctx, begin_training(algorithm, ctx)

    return make


@pytest.fixture
def train() -> Callable[[Algorithm, Ctx, Progress, int], list[tuple[int, int]]]:
    """Some rounds of training; the bytes down and up of every round."""

    def run(algorithm: Algorithm, ctx: Ctx, progress: Progress, rounds: int) -> list[tuple[int, int]]:
        traffic = []
        for _ in range(rounds):
            progress.round += 1
            cost = train_round(algorithm, progress, Ctx(ctx.task, ctx.protocol, ctx.seed, progress.round))
            traffic.append((cost.bytes_down, cost.bytes_up))
        return traffic

    return run


# --- watching a method at work ---


def tensors_in(value: object) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dictionaries and uploads, with its place."""
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, Upload):
        yield from tensors_in(value.message)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from ((f".{key}{place}", tensor) for place, tensor in tensors_in(inner))


@dataclass
class Witness:
    """Stands between the engine and a method: sees all that goes into the hooks and comes out of them."""

    algorithm: Algorithm
    called: set[str] = field(default_factory=set)
    cohorts: list[Any] = field(default_factory=list)
    states: list[tuple[str, object]] = field(default_factory=list)
    """(where, what) of every state and message that a hook returned"""
    changed: list[str] = field(default_factory=list)
    """inputs that a hook changed in place"""
    _copies: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for hook in ("init_server", "init_client", "poll", "select", "download", "update", "aggregate"):
            self._wrap(hook)
        for hook in ("global_model", "personal_model", "predict"):
            self._wrap(hook)

    def aliased(self) -> list[str]:
        """What hooks returned that was changed later on: views of the network's buffers, for instance."""
        return [where for where, tensor, copy in self._copies if not torch.equal(tensor, copy)]

    def _wrap(self, hook: str) -> None:
        original = getattr(self.algorithm, hook)

        def watched(*args: Any, **kwargs: Any) -> Any:
            self.called.add(hook)
            seen = [
                (f"{hook}: argument {i}{place}", t, t.clone()) for i, a in enumerate(args) for place, t in tensors_in(a)
            ]
            if hook == "aggregate":
                server, uploads, *rest = args
                args = (server, self._watch_uploads(uploads, seen), *rest)
            result = original(*args, **kwargs)
            self.changed += [where for where, tensor, copy in seen if not torch.equal(tensor, copy)]
            self._keep(hook, result)
            return result

        setattr(self.algorithm, hook, watched)

    def _watch_uploads(self, uploads: Iterable[Upload], seen: list[tuple[str, Tensor, Tensor]]) -> Iterator[Upload]:
        for upload in uploads:
            seen += [(f"aggregate: upload{place}", t, t.clone()) for place, t in tensors_in(upload)]
            yield upload

    def _keep(self, hook: str, result: Any) -> None:
        if hook == "select":
            self.cohorts.append(result)
        elif hook != "predict":
            parts = {"message": result[0], "memory": result[1]} if hook == "update" else {"state": result}
            for name, part in parts.items():
                self.states.append((f"{hook}: {name}", part))
                self._copies += [(f"{hook}: {name}{place}", t, t.clone()) for place, t in tensors_in(part)]


@pytest.fixture
def witness() -> type[Witness]:
    return Witness


@dataclass
class Trace:
    """All states of a run, bit for bit."""

    entries: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)

    def add(self, where: str, state: State) -> None:
        self.entries.append((where, {key: value.cpu().numpy().tobytes() for key, value in state.items()}))


@pytest.fixture
def run(method, new_recorder, tmp_path, monkeypatch) -> Callable[..., tuple[Any, Trace]]:
    """Simulate a job, stopping and going on after the given rounds; what it recorded, and all its states."""
    cls, numbers, trace = methods.get(method), count(), Trace()
    update, aggregate = cls.update, cls.aggregate

    def traced_update(self, down, memory, data, ctx):
        message, kept = update(self, down, memory, data, ctx)
        trace.add(f"round {ctx.round}, client {ctx.client}, message", message)
        trace.add(f"round {ctx.round}, client {ctx.client}, memory", kept)
        return message, kept

    def traced_aggregate(self, server, uploads, ctx):
        merged = aggregate(self, server, uploads, ctx)
        trace.add(f"round {ctx.round}, server", merged)
        return merged

    monkeypatch.setattr(cls, "update", traced_update)
    monkeypatch.setattr(cls, "aggregate", traced_aggregate)

    def simulate_job(job: JobSpec, stops: tuple[int, ...] = ()) -> tuple[Any, Trace]:
        nonlocal trace
        trace, recorder, folder = Trace(), new_recorder(), Path(tmp_path / f"run {next(numbers)}")
        for stop in stops:
            place = Surroundings(folder, should_stop=lambda stop=stop: recorder.last_round() >= stop)
            assert simulate(job, recorder, place) == "interrupted"
        assert simulate(job, recorder, Surroundings(folder)) == "done"
        return recorder, trace

    return simulate_job

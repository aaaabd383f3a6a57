"""The contract of a method.

State is data: every state and every message is a dictionary of tensors, and nothing else crosses a boundary. States are
never changed in place: a hook returns new ones, so that checkpoints, best states and byte counts come for free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedbench.job import Frozen, Protocol
from fedbench.registry import Registry
from fedbench.rng import numpy_rng, torch_rng
from fedbench.task import ClientData, Task

State = dict[str, Tensor]
Message = dict[str, Tensor]
PredictMode = Literal["mean", "mc"]


class Params(Frozen):
    """Hyperparameters of a method: subclass it, with a description per field."""


@dataclass(frozen=True)
class Ctx:
    """Where a hook is called: the task, the protocol, the round, and the client (None on the server)."""

    task: Task
    protocol: Protocol
    seed: int
    round: int = 0
    client: int | None = None
    novel: bool = False
    """True for a newcomer after training: what the method shares is fixed, only what is the client's own may learn."""

    @property
    def rounds(self) -> int:
        return self.protocol.rounds

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of training samples of every client."""
        return self.task.sizes

    @property
    def n(self) -> int:
        """Number of training samples of this client."""
        assert self.client is not None
        return self.task.sizes[self.client]

    def at(self, client: int | None) -> Ctx:
        """The same moment, seen from a client."""
        return replace(self, client=client)

    def rng(self, purpose: str, *, on_cpu: bool = False) -> torch.Generator:
        """The generator of this (seed, purpose, round, client), at its start; on the task's device by default."""
        device = torch.device("cpu") if on_cpu else self.task.device
        return torch_rng(self.seed, purpose, self.round, self.client, device)


@dataclass(frozen=True)
class Cohort:
    """Who trains in a round, and who uploads; report is a part of train. Both sorted."""

    train: tuple[int, ...]
    report: tuple[int, ...]


@dataclass(frozen=True)
class Upload:
    """What one client sends up."""

    client: int
    n: int
    message: Message


class Algorithm:
    """A federated method. Subclass it in a file of `algorithms/`; the file's name is the method's name."""

    version: ClassVar[int] = 1
    """Part of the job key: raise it when results change."""
    title: ClassVar[str]
    """The name that papers print."""
    pooled: ClassVar[bool] = False
    """True: the cohort's data is one client's (Centralised); nothing is sent."""
    regression: ClassVar[bool] = False
    """True: works on numbers to predict, too. Every class says so for itself (see `fits_regression`)."""
    Params: ClassVar[type[Frozen]] = Params
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Protocol settings that this method wants where neither paper nor grid says otherwise."""

    def __init__(self, params: Frozen) -> None:
        self.params: Any = params

    def init_server(self, ctx: Ctx) -> State:
        """The server's state before the first round."""
        raise NotImplementedError

    def init_client(self, ctx: Ctx) -> State:
        """What a client keeps between rounds, before it first takes part."""
        return {}

    def polls(self) -> bool:
        """Whether all clients are asked before selection: by default if the method overrides `poll`."""
        return type(self).poll is not Algorithm.poll

    def poll(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> Message | None:
        """What every client sends before selection."""
        return None

    def select(self, server: State, polls: Mapping[int, Message], ctx: Ctx) -> Cohort:
        """Who takes part: by default f N clients, drawn uniformly, the same for every method of a comparison."""
        everyone = ctx.task.members
        # the small term keeps floor(0.29 * 100) at 29
        m = max(1, int(ctx.protocol.f * len(everyone) + 1e-9))
        drawn = numpy_rng(ctx.seed, "cohort", ctx.round).choice(len(everyone), m, replace=False)
        report = tuple(sorted(everyone[index] for index in drawn))
        return Cohort(train=everyone if ctx.protocol.train_all else report, report=report)

    def download(self, server: State, ctx: Ctx) -> Message:
        """What travels down to ctx.client."""
        return server

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        """Local work: what travels up, and what stays."""
        raise NotImplementedError

    def relay(self, server: State, upload: Upload, ctx: Ctx) -> State:
        """The state from which later clients of the same round download: by default what it was, they work in parallel.

        A method whose clients work one after the other hands on here what a client sent. Clients come sorted.
        """
        return server

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """The new server state. Uploads come sorted by client, and lazily: each is computed when it is asked for."""
        raise NotImplementedError

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        """The model that GM scores; None if the method has none. The same object for clients that share it."""
        return server

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The model that the client deploys (PM); None if the method has none.

        `epochs` None asks for what the client has now, a number for a model adapted by so many passes over its data.
        A client that never trained comes with init_client's memory.
        """
        return None

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """Figures of the model itself, recorded with its scores: how sparse it is, say. Averaged over clients."""
        return {}

    def predicts_by_sampling(self) -> bool:
        """Whether MC prediction differs from the mean: by default if the method overrides `predict`."""
        return type(self).predict is not Algorithm.predict

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """Class probabilities; in regression the predicted numbers. Point models ignore the mode."""
        ctx.task.net.load(model["w"])
        return ctx.task.net.predict(x)


methods: Registry[Algorithm] = Registry("fedbench.algorithms", "method", Algorithm)


def fits_regression(method: type[Algorithm]) -> bool:
    """Whether the class itself says that it works on regression. Not inherited: a variation may need classes."""
    return bool(vars(method).get("regression", False))

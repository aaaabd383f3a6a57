"""The base of methods that average one part of the network and leave the other with each client."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, Message, State, Upload
from fedbench.errors import FedbenchError
from fedbench.models.network import Network
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    average,
    backward,
    local_batches,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
)

Parts = dict[str, slice]
"""Where the parts lie in the trained vector: `shared` and `own`, which make it up, and `all` of it."""


class SplitNetwork:
    """The process's network with one client's parts in it. A part that does not train cannot move.

    Each part that trains has its own optimiser: without a step of its own neither momentum, Adam nor weight decay
    reaches a coordinate. For a newcomer (`ctx.novel`) the shared part never trains.
    """

    def __init__(self, state: State, parts: Parts, ctx: Ctx, lr: float | None = None) -> None:
        """`state` holds the values of both parts and, under the names of trained parts, optimisers' histories."""
        self._net, self._state, self._parts, self._ctx, self._lr = ctx.task.net, state, parts, ctx, lr
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._net.load(joined(state, parts))

    def train(self, batches: Iterable[tuple[Tensor, Tensor]], part: str) -> None:
        """One step of the part on every batch; the rest keeps its values, running statistics among them."""
        if self._ctx.novel:
            if part == "shared":
                return
            part = "own" if part == "all" else part
        optimizer, before = self._optimizer(part), self["all"]
        for x, y in batches:
            backward(self._net, x, y)
            optimizer.step()
        before[self._parts[part]] = self[part]
        self._net.load(before)

    def __getitem__(self, part: str) -> Tensor:
        """A copy of the part as it is now."""
        return self._net.vector.detach()[self._parts[part]].clone()

    def histories(self) -> State:
        """The optimisers' histories, where the protocol keeps them over rounds."""
        kept: State = {}
        for part, optimizer in self._optimizers.items():
            kept |= optimizer_state(optimizer, self._ctx, f"{part}.")
        return kept

    def _optimizer(self, part: str) -> torch.optim.Optimizer:
        if part not in self._optimizers:
            optimizer = make_optimizer(self._net.parameter(self._parts[part]), self._ctx, self._lr)
            restore_optimizer(optimizer, self._state, f"{part}.")
            self._optimizers[part] = optimizer
        return self._optimizers[part]


class PartlyShared(Algorithm):
    """The server averages the shared part; a client keeps its own. PM joins them after the download; there is no GM.

    Every client's own part starts from the common initial network: a newcomer's, too.
    """

    def shared(self, net: Network) -> slice:
        """The part that travels, the first or the last coordinates of the trained vector; by default the body."""
        if net.body.stop == 0:
            raise FedbenchError(f"{self.title} shares the body, and a single layer has none.", "Use a deeper network.")
        return net.body

    def train(self, net: SplitNetwork, data: ClientData, ctx: Ctx) -> None:
        """The local work of a round; by default both parts at once."""
        net.train(local_batches(data, ctx), "all")

    def parts(self, ctx: Ctx) -> Parts:
        shared, everything = self.shared(ctx.task.net), slice(0, ctx.task.net.d)
        own = slice(shared.stop, everything.stop) if shared.start == 0 else slice(0, shared.start)
        return {"all": everything, "shared": shared, "own": own}

    def init_server(self, ctx: Ctx) -> State:
        return {"shared": ctx.task.initial[self.parts(ctx)["shared"]].clone()}

    def init_client(self, ctx: Ctx) -> State:
        return {"own": ctx.task.initial[self.parts(ctx)["own"]].clone()}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        net = SplitNetwork({**down, **memory}, self.parts(ctx), ctx)
        self.train(net, data, ctx)
        return {"shared": net["shared"]}, {"own": net["own"], **net.histories()}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return average(server, uploads, ctx)

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        return None

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The server's part with the client's own; adapted: the own part trained on, the server's as it is."""
        known = {**server, **memory}
        if epochs is None:
            return {"w": joined(known, self.parts(ctx))}
        values, protocol = {part: known[part] for part in ("shared", "own")}, ctx.protocol
        net = SplitNetwork(values, self.parts(ctx), ctx, adapt_rate(ctx))
        ctx.task.net.use_generator(ctx.rng("adapt_dropout"))
        net.train(data.batches(protocol.batch_size, ctx.rng("adapt"), epochs=epochs), "own")
        return {"w": net["all"]}


def joined(state: State, parts: Parts) -> Tensor:
    """The vector that the shared and the own part make up."""
    first, second = sorted(("shared", "own"), key=lambda part: parts[part].start)
    return torch.cat([state[first], state[second]])

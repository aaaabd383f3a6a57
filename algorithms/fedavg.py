"""FedAvg: every client trains the server's model; the server averages."""

from __future__ import annotations

from collections.abc import Iterable

from fedbench.algorithm import Algorithm, Ctx, Message, State, Upload
from fedbench.task import ClientData
from fedbench.training import average, local_sgd


class FedAvg(Algorithm):
    title = "FedAvg"

    def init_server(self, ctx: Ctx) -> State:
        return {"w": ctx.task.initial}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        w, kept = local_sgd(down["w"], data, ctx, memory)
        return {"w": w}, kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return average(server, uploads, ctx)

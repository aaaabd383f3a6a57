"""FedSOUL-VI local: FedSOUL as in BPFed's repository, where the averaged body reaches nobody: local training.

Every client's body and Gaussian head stay its own. Bodies travel up and are averaged, but no client uses the average;
only the global model does, which is the average under the client's own head, as the repository logs it.
"""

from __future__ import annotations

from fedbench.algorithm import Ctx, Message, State
from fedbench.task import ClientData

from .fedsoul_vi import FedSOULVI


class FedSOULVILocal(FedSOULVI):
    """A newcomer gets the average and keeps it fixed (specification, 4.6); the repository's has an untrained body."""

    title = "FedSOUL-VI local"

    def init_client(self, ctx: Ctx) -> State:
        return super().init_client(ctx) | self.init_server(ctx)

    def download(self, server: State, ctx: Ctx) -> Message:
        return server if ctx.novel else {}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        message, kept = super().update(down, memory, data, ctx)
        return message, kept | message

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        return self._model(server["shared"], memory, ctx)

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The client's own body and head; adapted: the head fitted on."""
        body = server if ctx.client in ctx.task.newcomers else memory
        return super().personal_model({}, {**memory, "shared": body["shared"]}, data, ctx, epochs)

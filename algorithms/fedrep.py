"""FedRep: the body is averaged, every client keeps its own head; first the head is trained, then the body."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedbench.algorithm import Ctx, Params
from fedbench.partly_shared import PartlyShared, SplitNetwork
from fedbench.task import ClientData
from fedbench.training import local_batches


class FedRepParams(Params):
    scheme: Literal["phases", "batches"] = Field(
        "phases",
        description="first the head, then the body; or, on every batch, one step of both, then head_steps of the head "
        "(BPFed's code)",
    )
    rep_epochs: int | None = Field(
        None, ge=0, description="phases: work on the body, in local_unit; default: a tenth of tau, at least 1"
    )
    head_epochs: int | None = Field(
        None, ge=0, description="phases: work on the head, in local_unit; default: the rest of tau, at least 1"
    )
    head_steps: int = Field(4, ge=0, description="batches: steps of the head alone on every batch")


class FedRep(PartlyShared):
    """Head and body have an optimiser each; so have, in the scheme `batches`, the common steps and the head's own.

    FedRep's own settings are 10 epochs of the head and 1 of the body (tau 11), FedABML's 4 and 1 (tau 5). With
    `local_unit: batch` both count batches, as tau does.
    """

    title = "FedRep"
    Params = FedRepParams

    def train(self, net: SplitNetwork, data: ClientData, ctx: Ctx) -> None:
        if self.params.scheme == "batches":
            for batch in local_batches(data, ctx):
                net.train([batch], "all")
                net.train([batch] * self.params.head_steps, "own")
            return
        head, body = self._work(ctx.protocol.tau)
        order = ctx.rng("batches")
        net.train(local_batches(data, ctx, head, order), "own")
        net.train(local_batches(data, ctx, body, order), "shared")

    def _work(self, tau: int) -> tuple[int, int]:
        """How much of head and of body."""
        p = self.params
        body = max(1, tau // 10) if p.rep_epochs is None else p.rep_epochs
        head = max(1, tau - body) if p.head_epochs is None else p.head_epochs
        return head, body

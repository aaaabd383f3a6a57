"""BPFed: body and head have posteriors; the body's prior comes from the server, the head's from the client's past.

F_i = E_q[-log p(D_i | head, body)] + KL(q || previous own head posterior x server's body posterior)
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field

from fedbench.algorithm import Ctx, Message, State
from fedbench.bayes import Gaussian, KLDirection
from fedbench.errors import FedbenchError
from fedbench.task import ClientData

from .pfedbayes import PFedBayes, PFedBayesParams


class BPFedParams(PFedBayesParams):
    zeta: float = Field(1.0, ge=0, description="weight of the KL to the anchor (public code: 0.001, kl_scale steps)")
    upload: Literal["anchor", "fit"] = Field("anchor", description="whose body travels up: the prior's or the fit's")
    personal_reset: bool = Field(
        True, description="the fitted body starts every round from the download; false: it goes on (public code)"
    )
    kl_direction: KLDirection = Field(
        "forward", description="both steps: KL(fit || anchor), or reverse: KL(anchor || fit) (public code)"
    )


class BPFed(PFedBayes):
    """pFedBayes on a prior that joins the downloaded body with the client's own last head; only bodies travel.

    A client keeps its fit, body and head. For a newcomer (`ctx.novel`), and in adaptation, only the head moves.
    """

    title = "BPFed"
    Params = BPFedParams

    def init_server(self, ctx: Ctx) -> State:
        if ctx.task.net.body.stop == 0:
            raise FedbenchError("BPFed shares the body, and a single layer has none.", "Use a deeper network.")
        return _body(super().init_server(ctx), ctx)

    def init_client(self, ctx: Ctx) -> State:
        return super().init_server(ctx.at(None))

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        anchor = _with_body(memory, down, ctx)
        start = {**memory, **anchor} if self.params.personal_reset or ctx.novel else memory
        message, kept = super().update(anchor, start, data, ctx)
        return _body(message if self.params.upload == "anchor" else kept, ctx), kept

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        return None

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The fit; adapted: the server's body as it is, with the client's head trained on it."""
        if epochs is None:
            return memory
        anchor = _with_body(memory, server, ctx)
        return super().personal_model(anchor, anchor, data, replace(ctx, novel=True), epochs)

    def _posterior(self, state: State, ctx: Ctx) -> Gaussian:
        posterior = super()._posterior(state, ctx)
        if ctx.novel:
            posterior.hold(ctx.task.net.body)
        return posterior

    @property
    def _kl_direction(self) -> KLDirection:
        direction: KLDirection = self.params.kl_direction
        return direction


def _body(state: State, ctx: Ctx) -> State:
    """The body's posterior, without the head's."""
    return {key: state[key][ctx.task.net.body].clone() for key in ("mu", "rho")}


def _with_body(memory: State, body: State, ctx: Ctx) -> State:
    """The client's own head posterior on this body's."""
    first = ctx.task.net.body.stop
    return {key: torch.cat([body[key], memory[key][first:]]) for key in ("mu", "rho")}

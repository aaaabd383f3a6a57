"""HeurFedAMP: every client starts from its own mixture of all clients' models, more of those that are like its own.

u_i = xi w_i + (1 - xi) sum_{j != i} softmax_j(s cos(w_i, w_j)) w_j
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, Message, Params, State, Upload
from fedbench.task import ClientData
from fedbench.training import fine_tune, local_sgd, proximal


class HeurFedAMPParams(Params):
    xi: float = Field(0.5, ge=0, le=1, description="weight of a client's own model in its mixture")
    scale: float = Field(25.0, ge=0, description="s, factor on the cosines")
    prox: float = Field(1e-4, ge=0, description="weight of ||w - u||^2 / 2 in local training (lambda / alpha_k)")
    personal: Literal["cloud", "trained"] = Field(
        "cloud", description="personal model: the mixture u_i, or w_i after local training"
    )


class HeurFedAMP(Algorithm):
    """The server keeps the last model of every client (`models`, a row each), who has sent one, and the weights.

    A client's model is w_0 until it sends one, and until then it is in no other client's mixture. A newcomer, whose
    own model says nothing yet, gets the mean of all that were sent.
    """

    title = "HeurFedAMP"
    Params = HeurFedAMPParams

    def init_server(self, ctx: Ctx) -> State:
        n, initial = ctx.task.clients, ctx.task.initial
        return {
            "models": initial.expand(n, -1),
            "sent": torch.zeros(n, dtype=torch.bool, device=initial.device),
            "weights": torch.eye(n, device=initial.device),
        }

    def download(self, server: State, ctx: Ctx) -> Message:
        """u_i."""
        return {"w": server["weights"][ctx.client] @ server["models"]}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        u = down["w"]
        w, kept = local_sgd(u, data, ctx, memory, extra_grad=proximal(u, self.params.prox))
        return {"w": w}, {"w": w, **kept}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        models, sent = server["models"].clone(), server["sent"].clone()
        for upload in uploads:
            models[upload.client] = upload.message["w"]
            sent[upload.client] = True
        weights = mixing_weights(models, sent, self.params.xi, self.params.scale)
        weights[list(ctx.task.newcomers)] = sent / sent.sum()
        return {"models": models, "sent": sent, "weights": weights}

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        return None

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """u_i or w_i; adapted: trained on, still held near u_i. A newcomer that trained has w_i: it sends nothing."""
        trained = self.params.personal == "trained" or ctx.client in ctx.task.newcomers
        cloud = self.download(server, ctx)
        own = memory if trained and memory else cloud
        if epochs is None:
            return own
        hold = proximal(ctx.task.net.extended(cloud["w"]), self.params.prox)
        return {"w": fine_tune(own["w"], data, ctx, epochs, extra_grad=hold)}


def mixing_weights(models: Tensor, sent: Tensor, xi: float, scale: float) -> Tensor:
    """Row i: how much of every client's model (a row of `models`) is in u_i.

    Only models that were `sent` are given to others; a client to whom nobody else has sent keeps its own.
    """
    products = models @ models.T
    norms = products.diagonal().sqrt()
    similarity = scale * products / norms.outer(norms).clamp_min(1e-12)
    others = sent.repeat(len(models), 1).fill_diagonal_(False)
    alone = ~others.any(1)
    # softmax subtracts the maximum before it exponentiates, without which s = 25 would overflow sums
    weights = similarity.masked_fill_(~others, -torch.inf).softmax(1).mul_(1 - xi)
    weights[alone] = 0.0
    weights.diagonal().copy_(torch.where(alone, 1.0, xi))
    return weights

"""SCAFFOLD: FedAvg whose clients correct their drift by control variates, c - c_i added to every gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from fedbench.algorithm import Ctx, Message, Params, State, Upload
from fedbench.errors import FedbenchError
from fedbench.task import ClientData
from fedbench.training import learning_rate, local_sgd, weight_of

from .fedavg import FedAvg


class ScaffoldParams(Params):
    clip: float | None = Field(
        None, gt=0, description="largest norm of a batch's gradient, before the correction (public code: 10)"
    )


class Scaffold(FedAvg):
    """`w` is the model x on the server and Delta y in an upload; the server's rate eta_g is the protocol's beta."""

    title = "SCAFFOLD"
    regression = True
    Params = ScaffoldParams
    defaults: ClassVar = {"weighting": "uniform"}

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError where the formula of c_i would not be a mean of gradients."""
        if ctx.protocol.optimizer != "sgd" or ctx.protocol.momentum:
            raise FedbenchError(
                "SCAFFOLD needs plain SGD: only then is (x - y) / (K lr) the mean of a client's K gradients.",
                "Set optimizer=sgd and momentum=0.",
            )
        if ctx.task.net.keeps_statistics:
            raise FedbenchError("SCAFFOLD would correct running statistics.", "Use norm bn_nostats or gn.")
        return {"w": ctx.task.initial, "c": torch.zeros_like(ctx.task.initial)}

    def init_client(self, ctx: Ctx) -> State:
        return {"c": torch.zeros_like(ctx.task.initial)}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        x, c, c_i = down["w"], down["c"], memory["c"]
        correction, steps = c - c_i, 0

        def correct(y: Tensor, grad: Tensor) -> None:
            nonlocal steps
            steps += 1
            if self.params.clip is not None:
                clip_grad_norm_(y, self.params.clip)
            grad.add_(correction)

        y, _ = local_sgd(x, data, ctx, extra_grad=correct)
        delta_y = y.sub_(x)
        # c_i+ = c_i - c + (x - y) / (K eta)
        delta_c = torch.add(c, delta_y, alpha=1 / (steps * learning_rate(ctx))).neg_()
        return {"w": delta_y, "c": delta_c}, {"c": c_i + delta_c}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """x <- x + eta_g mean(Delta y); c <- c + (1/N) sum(Delta c), over all N clients, not over those that report."""
        total, delta_x, c = 0.0, torch.zeros_like(server["w"]), server["c"].clone()
        for upload in uploads:
            weight = weight_of(upload, ctx)
            total += weight
            delta_x.add_(upload.message["w"], alpha=weight)
            c.add_(upload.message["c"], alpha=1 / len(ctx.task.members))
        return {"w": torch.add(server["w"], delta_x, alpha=ctx.protocol.beta / total), "c": c}

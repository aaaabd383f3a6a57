"""IFCA: several models on the server; every client trains the one with the smallest loss on its data.

k_i = argmin_k f_i(w_k); then w_k is the average over the clients that chose it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import torch
from pydantic import Field

from fedbench.algorithm import Ctx, Message, Params, State, Upload
from fedbench.clustered import ChosenByClients
from fedbench.task import ClientData
from fedbench.training import weight_of

from .fedavg import FedAvg


class IFCAParams(Params):
    n_clusters: int = Field(2, ge=1, description="K, the server's models")
    restarts: int = Field(
        1, ge=1, description="random beginnings that are tried side by side, against collapse to one cluster (5)"
    )
    restart_rounds: int = Field(
        10, ge=1, description="rounds after which the beginning with the smallest loss goes on alone"
    )


class IFCA(ChosenByClients, FedAvg):
    """With one cluster and one beginning this is FedAvg.

    For the first `restart_rounds` rounds the server has K models of every beginning, one beginning after the other. In
    each of them a client chooses and trains, and it says how well the chosen model did before it was trained. The
    server puts the beginning with the smallest mean loss first: its models are the ones that are scored, and in the end
    the only ones. All of this is traffic, and is counted. Optimisers' histories are kept from then on.
    """

    title = "IFCA"
    Params = IFCAParams
    defaults: ClassVar = {"weighting": "uniform"}

    def n_models(self, server: State) -> int:
        """Those of the first beginning."""
        return int(self.params.n_clusters)

    def init_server(self, ctx: Ctx) -> State:
        """Independent draws; the first one is the common initial model."""
        p, draws = self.params, ctx.rng("clusters", on_cpu=True)
        others = (ctx.task.another_start(draws) for _ in range(p.restarts * p.n_clusters - 1))
        return {"w": torch.stack([ctx.task.initial, *others])}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        beginnings = self._beginnings(down)
        if len(beginnings) == 1:
            return super().update(down, memory, data, ctx)
        sent = []
        for models in beginnings:
            loss = self.losses(models, data, ctx).min() / data.n
            message, _ = super().update(models, {}, data, ctx)
            sent.append(message | {"loss": loss})
        return {key: torch.stack([message[key] for message in sent]) for key in sent[0]}, {}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        beginnings = self._beginnings(server)
        if len(beginnings) == 1:
            return super().aggregate(server, uploads, ctx)
        sent, merged = list(uploads), []
        for number, models in enumerate(beginnings):
            trained = [replace(u, message={key: u.message[key][number] for key in ("w", "cluster")}) for u in sent]
            merged.append(super().aggregate(models, trained, ctx)["w"])
        losses = torch.stack([weight_of(upload, ctx) * upload.message["loss"] for upload in sent]).sum(0)
        best_first = losses.argsort(stable=True).tolist()
        left = best_first if ctx.round < self.params.restart_rounds else best_first[:1]
        return {"w": torch.cat([merged[number] for number in left])}

    def _beginnings(self, server: State) -> list[State]:
        """The server's models, K of every beginning that is left."""
        return [{"w": models} for models in server["w"].split(self.params.n_clusters)]

"""FedCFL: clustered FL by update similarity: a cluster whose clients pull in opposite directions is split in two.

||mean_i Delta_i|| < eps1 and max_i ||Delta_i|| > eps2: together they are done, one by one they are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Cohort, Ctx, Message, Params, State, Upload
from fedbench.clustered import AssignedByServer
from fedbench.training import weight_of

from .fedavg import FedAvg

SCALE_ROUNDS = 5
"""The first rounds, whose largest updates are the unit of relative thresholds."""


class FedCFLParams(Params):
    thresholds: Literal["relative", "absolute"] = Field(
        "relative",
        description="eps1 and eps2 in units of the largest update (median over the first 5 rounds), or as they are",
    )
    eps1: float = Field(0.4, gt=0, description="a cluster may split when its mean update is shorter")
    eps2: float | None = Field(
        None, ge=0, description="and its longest update is longer; default: 0.6 relative, 1.6 absolute (public code)"
    )
    split_after: int = Field(20, ge=0, description="no cluster splits in the first so many rounds")


class FedCFL(AssignedByServer, FedAvg):
    """The server's models (`w`) grow in number. Every client takes part in every round. Without a split it is FedAvg.

    Clients send their models and the server takes the differences, Delta_i. The two parts of a cluster that splits
    begin as the averages over their own members in that round. `largest` is the longest Delta_i of the first rounds.
    """

    title = "FedCFL"
    Params = FedCFLParams
    defaults: ClassVar = {"weighting": "uniform"}

    def init_server(self, ctx: Ctx) -> State:
        initial, newcomers = ctx.task.initial, list(ctx.task.newcomers)
        assigned = torch.zeros(ctx.task.clients, dtype=torch.int32, device=initial.device)
        assigned[newcomers] = -1
        return {"w": initial[None], "assigned": assigned, "largest": initial.new_zeros(0)}

    def select(self, server: State, polls: Mapping[int, Message], ctx: Ctx) -> Cohort:
        """All clients, whatever the protocol's f: who does not train cannot be told apart."""
        return Cohort(train=ctx.task.members, report=ctx.task.members)

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        sent = list(uploads)
        clusters = server["assigned"][[upload.client for upload in sent]]
        weights = torch.tensor([weight_of(upload, ctx) for upload in sent], device=clusters.device)
        updates = torch.stack([upload.message["w"] for upload in sent]) - server["w"][clusters]
        norms: Tensor = torch.linalg.vector_norm(updates, dim=1)
        grown = {**server, "largest": torch.cat([server["largest"], norms.max()[None]])[:SCALE_ROUNDS]}
        for cluster in range(len(server["w"])):
            own = clusters == cluster
            mean = weights[own] @ updates[own] / weights[own].sum()
            if self._is_torn(mean.norm(), norms[own], grown["largest"], ctx):
                leaving = torch.tensor([upload.client for upload in sent])[own.cpu()][opposed(updates[own])]
                grown = _split(grown, cluster, leaving)
        return super().aggregate(grown, sent, ctx)

    def _is_torn(self, mean: Tensor, norms: Tensor, largest: Tensor, ctx: Ctx) -> bool:
        """Whether a cluster splits: more than two members, near a common optimum that is nobody's own."""
        p = self.params
        unit = largest.quantile(0.5) if p.thresholds == "relative" else 1.0
        eps2 = p.eps2 if p.eps2 is not None else {"relative": 0.6, "absolute": 1.6}[p.thresholds]
        enough = ctx.round > p.split_after and len(norms) > 2
        return bool(enough and mean < p.eps1 * unit and norms.max() > eps2 * unit)


def opposed(updates: Tensor) -> Tensor:
    """Two groups of updates by complete linkage on -cos: which of the rows are not in the first one's group."""
    from sklearn.cluster import AgglomerativeClustering

    directions = torch.nn.functional.normalize(updates.double(), dim=1)
    distances = -(directions @ directions.T).cpu().numpy()
    found = AgglomerativeClustering(2, metric="precomputed", linkage="complete").fit_predict(distances)
    return torch.from_numpy(found != found[0])


def _split(server: State, cluster: int, leaving: Tensor) -> State:
    """The server with another model, as yet a copy of the cluster's, to which some of its clients move."""
    assigned = server["assigned"].clone()
    assigned[leaving] = len(server["w"])
    return {**server, "w": torch.cat([server["w"], server["w"][cluster][None]]), "assigned": assigned}

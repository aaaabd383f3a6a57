"""FeSEM: k-means over the clients' models; every client trains on from the centre of its cluster.

min sum_i min_k ||w_i - c_k||^2, in turn with the local losses
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Params, State, Upload
from fedbench.clustered import AssignedByServer
from fedbench.errors import FedbenchError
from fedbench.training import weight_of

from .fedavg import FedAvg


class FeSEMParams(Params):
    n_clusters: int = Field(2, ge=1, description="K, the centres")
    seeding: Literal["k-means++", "random"] = Field(
        "k-means++", description="how the first centres are drawn from the first uploads (public code: random)"
    )
    first_steps: int = Field(10, ge=1, description="Lloyd steps on the first uploads; one in every later round")
    compare: Literal["all", "head"] = Field(
        "all", description="what distances are measured on: all parameters, or the head (public code: one layer)"
    )


class FeSEM(AssignedByServer, FedAvg):
    """The server keeps the centres (`w`) and where clients belong (`assigned`). With one centre this is FedAvg.

    All clients begin with the common initial model. The first uploads are clustered by k-means. From then on those
    that report move to the nearest centre, and a centre becomes the mean of the models that were sent to it; clients
    that do not report stay where they are, and do not count.
    """

    title = "FeSEM"
    Params = FeSEMParams
    defaults: ClassVar = {"weighting": "uniform"}

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError when distances would be measured on what is not trained."""
        if self.params.compare == "head" and ctx.task.net.d < ctx.task.net.flat.numel():
            raise FedbenchError("FeSEM cannot compare heads that nobody trains.", "Use train_part all or compare all.")
        initial = ctx.task.initial
        return {
            "w": initial.repeat(self.params.n_clusters, 1),
            "assigned": torch.full((ctx.task.clients,), -1, dtype=torch.int32, device=initial.device),
        }

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        sent, assigned = list(uploads), server["assigned"].clone()
        part = ctx.task.net.head if self.params.compare == "head" else slice(None)
        models, nobody_yet = [upload.message["w"][part] for upload in sent], bool((assigned < 0).all())
        clusters = self._first_clusters(models, sent, ctx) if nobody_yet else nearest(models, server["w"][:, part])
        assigned[[upload.client for upload in sent]] = torch.tensor(clusters, dtype=torch.int32, device=assigned.device)
        return super().aggregate({**server, "assigned": assigned}, sent, ctx)

    def _first_clusters(self, models: list[Tensor], sent: list[Upload], ctx: Ctx) -> list[int]:
        """K-means on the first uploads; the clusters are numbered in the order of their first clients."""
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning

        p, seed = self.params, ctx.rng("k-means", on_cpu=True).initial_seed() % 2**32
        wanted = min(p.n_clusters, len(models))  # a centre without a model stays where it is
        k_means = KMeans(wanted, init=p.seeding, n_init=1, max_iter=p.first_steps, random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # equal models make fewer clusters
            found = k_means.fit_predict(
                torch.stack(models).cpu().numpy(), sample_weight=[weight_of(u, ctx) for u in sent]
            )
        numbers = {label: number for number, label in enumerate(dict.fromkeys(found.tolist()))}
        return [numbers[label] for label in found.tolist()]


def nearest(models: list[Tensor], centres: Tensor) -> list[int]:
    """For every model the number of the centre at the smallest Euclidean distance; the first of equal ones."""
    return [int(torch.linalg.vector_norm(centres - w, dim=1, dtype=torch.float64).argmin()) for w in models]

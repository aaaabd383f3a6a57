"""cFedBayes: pFedBayes with several server posteriors; every client takes the one that explains its data best.

k_i = argmax_k E_{u_k}[log p(D_i | theta)]; then client i is a client of pFedBayes whose prior is u_{k_i}.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from fedbench.algorithm import Ctx, Message, State, Upload
from fedbench.bayes import initial_gaussian
from fedbench.task import ClientData

from .pfedbayes import PFedBayes, PFedBayesParams


class CFedBayesParams(PFedBayesParams):
    n_clusters: int = Field(2, ge=1, description="K, the server's posteriors")
    choose_on: Literal["all", "batch"] = Field(
        "all",
        description="a client compares the clusters on all its training data at their means, or on one mini-batch "
        "with `samples` weight samples (paper)",
    )


class CFedBayes(PFedBayes):
    """The server's posteriors are the rows of its tensors. With one cluster this is pFedBayes.

    A client's own posterior persists when its cluster changes; it starts from the initial posterior of the cluster that
    the client chooses first, so a client that never trained keeps nothing.
    """

    title = "cFedBayes"
    Params = CFedBayesParams

    def __init__(self, params: CFedBayesParams) -> None:
        super().__init__(params)
        self._shown: tuple[State, dict[int, State]] = {}, {}

    def init_server(self, ctx: Ctx) -> State:
        initial = [self._initial(cluster, ctx) for cluster in range(self.params.n_clusters)]
        return {key: torch.stack([state[key] for state in initial]) for key in ("mu", "rho")}

    def init_client(self, ctx: Ctx) -> State:
        return {}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        cluster = self._choose(down, data, ctx)
        own = memory or self._initial(cluster, ctx)
        message, kept = super().update(_row(down, cluster), own, data, ctx)
        return message | {"cluster": torch.tensor([cluster], dtype=torch.int32, device=ctx.task.device)}, kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """Cluster by cluster; one that nobody chose stays as it is."""
        chosen: dict[int, list[Upload]] = {}
        for upload in uploads:
            posterior = {key: value for key, value in upload.message.items() if key != "cluster"}
            members = chosen.setdefault(int(upload.message["cluster"]), [])
            members.append(replace(upload, message=posterior))
        merged = {key: value.clone() for key, value in server.items()}
        for cluster, members in chosen.items():
            for key, value in super().aggregate(_row(server, cluster), members, ctx).items():
                merged[key][cluster] = value
        return merged

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        """The posterior that the client chooses on its training data; the same object for all who choose it."""
        if self._shown[0] is not server:
            self._shown = server, {}
        cluster = self._choose(server, data, ctx)
        return self._shown[1].setdefault(cluster, _row(server, cluster))

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """As in pFedBayes, with the chosen cluster's posterior as the server's."""
        if memory and epochs is None:
            return memory
        cluster = self._choose(server, data, ctx)
        own = memory or self._initial(cluster, ctx)
        return super().personal_model(_row(server, cluster), own, data, ctx, epochs)

    def _initial(self, cluster: int, ctx: Ctx) -> State:
        """A cluster's posterior before the first round, with a mean of its own; the first one's is pFedBayes's."""
        p, start = self.params, replace(ctx, round=0, client=None)
        purpose = "init_gaussian" if cluster == 0 else f"init_gaussian {cluster}"
        return initial_gaussian(start, p.rho0, p.mu_std, p.bayes_norm, purpose)

    def _choose(self, server: State, data: ClientData, ctx: Ctx) -> int:
        """The cluster with the smallest expected loss on the client's training data; the first of equal ones."""
        if len(server["mu"]) == 1:
            return 0
        losses = [self._loss(_row(server, cluster), data, ctx) for cluster in range(len(server["mu"]))]
        return int(torch.stack(losses).argmin())

    def _loss(self, posterior: State, data: ClientData, ctx: Ctx) -> Tensor:
        """The loss that the client compares; batch and noise are the same for every cluster."""
        size, net = ctx.protocol.batch_size, ctx.task.net
        if self.params.choose_on == "all":
            batches, draws = data.chunks(size), [posterior["mu"]]
        else:
            batches, draws = data.batches(size, ctx.rng("choice"), steps=1), self._draws(posterior, ctx)
        total = torch.zeros((), dtype=torch.float64, device=ctx.task.device)
        with torch.no_grad():
            for x, y in batches:
                for theta in draws:
                    net.load(theta)
                    total += cross_entropy(net.logits(x), y, reduction="sum")
        return total

    def _draws(self, posterior: State, ctx: Ctx) -> list[Tensor]:
        """Weights drawn from a posterior."""
        p, rng, sigma = self.params, ctx.rng("choice_noise"), softplus(posterior["rho"])
        noise = torch.randn((p.samples, *sigma.shape), generator=rng, device=rng.device)
        return list(posterior["mu"] + sigma * noise * (self._random(ctx) * p.noise_scale))


def _row(server: State, cluster: int) -> State:
    """One cluster's posterior."""
    return {key: value[cluster] for key, value in server.items()}

"""cFedBayes: pFedBayes with several server posteriors; every client takes the one that explains its data best.

k_i = argmax_k E_{u_k}[log p(D_i | theta)]; then client i is a client of pFedBayes whose prior is u_{k_i}.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import softplus

from fedbench.algorithm import Ctx, State
from fedbench.bayes import initial_gaussian
from fedbench.clustered import ChosenByClients, summed_loss
from fedbench.task import ClientData

from .pfedbayes import PFedBayes, PFedBayesParams


class CFedBayesParams(PFedBayesParams):
    n_clusters: int = Field(2, ge=1, description="K, the server's posteriors")
    choose_on: Literal["all", "batch"] = Field(
        "all",
        description="a client compares the clusters on all its training data at their means, or on one mini-batch "
        "with `samples` weight samples (paper)",
    )


class CFedBayes(ChosenByClients, PFedBayes):
    """The server's posteriors are the rows of its tensors. With one cluster this is pFedBayes.

    A client's own posterior persists when its cluster changes; it starts from the initial posterior of the cluster that
    the client chooses first, so a client that never trained keeps nothing.
    """

    title = "cFedBayes"
    Params = CFedBayesParams
    rows: ClassVar = ("mu", "rho")

    def init_server(self, ctx: Ctx) -> State:
        initial = [self._initial(cluster, ctx) for cluster in range(self.params.n_clusters)]
        return {key: torch.stack([state[key] for state in initial]) for key in self.rows}

    def init_client(self, ctx: Ctx) -> State:
        return {}

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """As in pFedBayes, with the chosen cluster's posterior as the server's."""
        cluster = self.cluster_of(server, data, ctx)
        prior, own = self.model(server, cluster), self._own(memory, cluster, ctx)
        model = PFedBayes.personal_model(self, prior, own, data, ctx, epochs)
        return None if model is None else self.marked(model, cluster, server)

    def _own(self, memory: State, cluster: int, ctx: Ctx) -> State:
        return memory or self._initial(cluster, ctx)

    def _initial(self, cluster: int, ctx: Ctx) -> State:
        """A cluster's posterior before the first round, with a mean of its own; the first one's is pFedBayes's."""
        p, start = self.params, replace(ctx, round=0, client=None)
        purpose = "init_gaussian" if cluster == 0 else f"init_gaussian {cluster}"
        return initial_gaussian(start, p.rho0, p.mu_std, p.bayes_norm, purpose, p.rho_std)

    def _loss(self, model: State, data: ClientData, ctx: Ctx) -> Tensor:
        """The expected loss that a client compares; batch and noise are the same for every cluster."""
        size = ctx.protocol.batch_size
        if self.params.choose_on == "all":
            return summed_loss([model["mu"]], data.chunks(size), ctx)
        return summed_loss(self._draws(model, ctx), data.batches(size, ctx.rng("choice"), steps=1), ctx)

    def _draws(self, posterior: State, ctx: Ctx) -> list[Tensor]:
        """Weights drawn from a posterior."""
        p, rng, sigma = self.params, ctx.rng("choice_noise"), softplus(posterior["rho"])
        noise = torch.randn((p.samples, *sigma.shape), generator=rng, device=rng.device)
        return list(posterior["mu"] + sigma * noise * (self._random(ctx) * p.noise_scale))

"""sFedBayes: pFedBayes with sparse weights: every weight is kept with a probability lambda, and is 0 otherwise.

theta = gamma (mu + sigma eps), gamma ~ Bern(lambda): spike and slab, with the KL replaced by its upper bound
KL(Bern(lambda_i) || Bern(lambda_w)) + lambda_i KL(N_i || N_w).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Message, PredictMode, State, Upload
from fedbench.bayes import (
    ODDS_RANGE,
    Gaussian,
    LossGrad,
    SpikeSlab,
    aggregate_spike_slabs,
    predict_mc,
    predict_mean,
    set_spike_slab_elbo_grad,
    set_spike_slab_prior_grad,
)
from fedbench.task import ClientData

from .pfedbayes import PFedBayes, PFedBayesParams


class SFedBayesParams(PFedBayesParams):
    lambda0: float = Field(
        0.5, ge=0, le=1, description="initial lambda; 1 stays 1 with lambda_form logit (pFedBayes), paper: 0.5, 0.99"
    )
    lambda_form: Literal["logit", "raw"] = Field(
        "logit",
        description="what is trained and averaged: log odds of lambda, or lambda itself, clamped in use (paper)",
    )
    temp: float = Field(0.5, gt=0, description="temperature of the sigmoid that stands in for the gates' gradient")
    personal_reset: bool = Field(
        True, description="the personal posterior starts every round from the download; false: it goes on"
    )
    agg: Literal["param", "moment"] = Field("param", description="server: average (mu, rho, lambda), or match moments")


class SFedBayes(PFedBayes):
    """With lambda0 1 and without personal_reset this is pFedBayes. Point-valued parameters are always kept."""

    title = "sFedBayes"
    Params = SFedBayesParams
    defaults: ClassVar = {**PFedBayes.defaults, "mc_samples": 30}

    def init_server(self, ctx: Ctx) -> State:
        state, keep = super().init_server(ctx), torch.tensor(self.params.lambda0)
        gate = keep.logit().clamp(*ODDS_RANGE) if self.params.lambda_form == "logit" else keep
        return {**state, "gate": torch.full_like(state["mu"], float(gate))}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        start = {**memory, **down} if self.params.personal_reset else memory
        return super().update(down, start, data, ctx)

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return aggregate_spike_slabs(server, uploads, ctx, self.params.agg, self.params.lambda_form)

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """`kept`: share of weights in a sample (the paper prints it as sparsity); `lambda`: its mean, unclamped."""
        posterior = SpikeSlab(model, self.params.lambda_form, ctx.rng("mc_gates"))
        raw = model["gate"].sigmoid() if self.params.lambda_form == "logit" else model["gate"]
        return {"kept": float(posterior.keep.double().mean()), "lambda": float(raw.double().mean())}

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """At lambda mu, or averaged over draws of gates and weights."""
        random, posterior = self._random(ctx), SpikeSlab(model, self.params.lambda_form, ctx.rng("mc_gates"))
        if mode == "mean":
            return predict_mean({"mu": model["mu"] * (posterior.keep * random + (1 - random))}, x, ctx.task.net)
        return predict_mc(
            model,
            x,
            ctx.task.net,
            random * self.params.noise_scale,
            ctx.protocol.mc_samples,
            ctx.rng("mc"),
            gated=lambda weights: weights * posterior.draw_gates(random)[0],
        )

    def _posterior(self, state: State, ctx: Ctx) -> SpikeSlab:
        return SpikeSlab(state, self.params.lambda_form, ctx.rng("gates"))

    def _set_own_grad(
        self,
        own: Gaussian,
        shared: Gaussian,
        kl_weight: Tensor | float,
        loss_grad: LossGrad,
        noise: torch.Generator,
        ctx: Ctx,
    ) -> None:
        assert isinstance(own, SpikeSlab)
        assert isinstance(shared, SpikeSlab)
        p, random = self.params, self._random(ctx)
        set_spike_slab_elbo_grad(own, shared, kl_weight, loss_grad, random, p.noise_scale, p.samples, noise, p.temp)

    def _set_shared_grad(self, shared: Gaussian, own: Gaussian, weight: Tensor | float) -> None:
        assert isinstance(own, SpikeSlab)
        assert isinstance(shared, SpikeSlab)
        set_spike_slab_prior_grad(shared, own, weight)

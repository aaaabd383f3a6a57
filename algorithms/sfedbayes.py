"""sFedBayes: pFedBayes with sparse weights: every weight is kept with a probability lambda, and is 0 otherwise.

theta = gamma (mu + sigma eps), gamma ~ Bern(lambda): spike and slab, with the KL replaced by its upper bound
KL(Bern(lambda_i) || Bern(lambda_w)) + lambda_i KL(N_i || N_w).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Ctx, Message, PredictMode, State, Upload
from fedbench.bayes import (
    ODDS_RANGE,
    Gaussian,
    SpikeSlab,
    aggregate_spike_slabs,
    predict_mc,
    predict_mean,
    set_spike_slab_elbo_grad,
    set_spike_slab_prior_grad,
)
from fedbench.local_reparam import BatchLoss
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
    send_above: float = Field(
        0.0, ge=0, lt=1, description="weights with a smaller lambda travel as lambda alone, without mu and rho; 0: off"
    )
    local_reparam: Literal[False] = Field(False, description="not for gated weights, whose outputs are not Gaussian")


class SFedBayes(PFedBayes):
    """With lambda0 1 and without personal_reset this is pFedBayes. Point-valued parameters are always kept."""

    title = "sFedBayes"
    Params = SFedBayesParams
    defaults: ClassVar = {**PFedBayes.defaults, "mc_samples": 30}

    def init_server(self, ctx: Ctx) -> State:
        state, keep = super().init_server(ctx), torch.tensor(self.params.lambda0)
        gate = keep.logit().clamp(*ODDS_RANGE) if self.params.lambda_form == "logit" else keep
        return {**state, "gate": torch.full_like(state["mu"], float(gate))}

    def download(self, server: State, ctx: Ctx) -> Message:
        return self._thinned(server, ctx)

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        """What was not sent down is rarely drawn: the client takes a slab around 0 for it."""
        unknown = torch.zeros_like(down["gate"])
        shared = self._filled(down, {"mu": unknown, "rho": unknown + self.params.rho0}, ctx)
        start = {**memory, **shared} if self.params.personal_reset else memory
        message, kept = super().update(shared, start, data, ctx)
        return self._thinned(message, ctx), kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """For what a client did not send up, the server takes its own mu and rho."""
        whole = (replace(upload, message=self._filled(upload.message, server, ctx)) for upload in uploads)
        return aggregate_spike_slabs(server, whole, ctx, self.params.agg, self.params.lambda_form)

    def _thinned(self, state: State, ctx: Ctx) -> Message:
        """The message without mu and rho of weights below the threshold; all lambdas, which tell what is missing."""
        if self.params.send_above == 0:
            return state
        sent = self._sent(state["gate"], ctx)
        return {"mu": state["mu"][sent], "rho": state["rho"][sent], "gate": state["gate"]}

    def _filled(self, message: Message, unknown: State, ctx: Ctx) -> State:
        """The state that was thinned, with what is not known taken from another."""
        if self.params.send_above == 0:
            return message
        sent = self._sent(message["gate"], ctx)
        known = {key: unknown[key].masked_scatter(sent, message[key]) for key in ("mu", "rho")}
        return {**known, "gate": message["gate"]}

    def _sent(self, gate: Tensor, ctx: Ctx) -> Tensor:
        """Where mu and rho travel: large lambdas, and point values."""
        keep = gate.sigmoid() if self.params.lambda_form == "logit" else gate
        sent: Tensor = (keep >= self.params.send_above) | (self._random(ctx) == torch.zeros_like(gate))
        return sent

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
        loss: BatchLoss,
        noise: torch.Generator,
        ctx: Ctx,
    ) -> None:
        assert isinstance(own, SpikeSlab)
        assert isinstance(shared, SpikeSlab)
        p, random = self.params, self._random(ctx)
        set_spike_slab_elbo_grad(own, shared, kl_weight, loss.grad, random, p.noise_scale, p.samples, noise, p.temp)

    def _set_shared_grad(self, shared: Gaussian, own: Gaussian, weight: Tensor | float) -> None:
        assert isinstance(own, SpikeSlab)
        assert isinstance(shared, SpikeSlab)
        set_spike_slab_prior_grad(shared, own, weight)

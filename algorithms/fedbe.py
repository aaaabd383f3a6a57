"""FedBE: FedAvg whose server samples models from a distribution over its clients' and lets them predict together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div

from fedbench.algorithm import Ctx, Message, Params, PredictMode, State, Upload
from fedbench.errors import FedbenchError
from fedbench.rng import numpy_rng
from fedbench.training import average, weight_of

from .fedavg import FedAvg


def gaussian_draws(
    start: Tensor,
    models: Tensor,
    weights: Tensor,
    tensors: Iterable[slice],
    draws: int,
    *,
    var_floor: float,
    noise_scale: float,
    generator: torch.Generator,
) -> Tensor:
    """Models drawn around the clients' (rows), tensor by tensor: w_t + mean norm * N(mean, variance) of directions.

    A direction is the update of a client's tensor, w_i - w_t, divided by its norm; one without an update has none.
    """
    drawn = start.repeat(draws, 1)
    for part in tensors:
        updates = models[:, part] - start[part]
        norms = updates.norm(dim=1)
        directions = updates / torch.where(norms > 0, norms, 1.0)[:, None]
        mean = weights @ directions
        std = (weights @ (directions - mean).square()).clamp_min_(var_floor).sqrt_()
        noise = torch.randn((draws, len(std)), generator=generator, device=generator.device)
        drawn[:, part] += (weights @ norms) * (mean + noise_scale * std * noise)
    return drawn


def dirichlet_draws(
    models: Tensor, weights: Tensor, draws: int, concentration: float, rng: np.random.Generator
) -> Tensor:
    """Models sum_i p_i w_i of the clients' w_i (rows), p ~ Dir(concentration * m * weights), for m clients."""
    p = rng.dirichlet(concentration * len(models) * weights.cpu().double().numpy(), draws)
    # as deviations from one of them, so that clients that agree give that model and not one with a rounding error
    return models[0] + torch.from_numpy(p).to(models) @ (models - models[0])


class FedBEParams(Params):
    M: int = Field(3, ge=1, description="models that the server samples in a round")
    posterior: Literal["gaussian", "dirichlet"] = Field(
        "gaussian", description="samples: Gaussian directions from w_t, or random mixtures sum_i p_i w_i of the clients"
    )
    var_floor: float = Field(1e-5, ge=0, description="smallest variance of a coordinate of the Gaussian directions")
    noise_scale: float = Field(1.0, ge=0, description="factor on the Gaussian's standard deviation (public code: 0.1)")
    concentration: float = Field(
        1.0, gt=0, description="of the Dirichlet distribution; the larger, the nearer the mixtures are to the average"
    )
    include_mean: bool = Field(False, description="the average predicts along with the samples")
    distill: bool = Field(
        False,
        description="the model is a student of samples, clients and average, taught on the server's data "
        "(server_fraction)",
    )
    temperature: float = Field(0.5, gt=0, description="below 1 it sharpens the teachers' mean: p^(1/temperature)")
    distill_lr: float = Field(1e-3, gt=0, description="rate of the student's SGD, with momentum 0.9")
    distill_epochs: int = Field(20, ge=0, description="passes of the student over the server's data")
    swa_start: int = Field(500, ge=1, description="from this step on the student's iterates are averaged (SWA)")
    swa_every: int = Field(25, ge=1, description="steps between two iterates of that average")


class FedBE(FedAvg):
    """The server's state is FedAvg's w, which clients start from, and the samples that predict, a row each."""

    title = "FedBE"
    Params = FedBEParams

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError where a Gaussian would be drawn of variances."""
        if ctx.task.net.keeps_statistics and self.params.posterior == "gaussian":
            raise FedbenchError(
                "FedBE would add noise to running statistics.", "Use norm bn_nostats or gn, or posterior=dirichlet."
            )
        if self.params.distill:
            if ctx.task.server_data() is None:
                raise FedbenchError("FedBE has no data to distil on.", "Set server_fraction=0.01, or distill=false.")
            return {"w": ctx.task.initial}
        return {"w": ctx.task.initial, "ensemble": ctx.task.initial.repeat(self.params.M, 1)}

    def download(self, server: State, ctx: Ctx) -> Message:
        return {"w": server["w"]}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """FedAvg's average, and new samples from the clients that report; beta extrapolates all of them."""
        clients = list(uploads)
        if not clients:
            return server
        merged, drawn = average({"w": server["w"]}, clients, ctx), self._draw(server["w"], clients, ctx)
        if not self.params.distill:
            return merged | {"ensemble": drawn}
        return {"w": self._student(merged["w"], [*drawn, *(c.message["w"] for c in clients), merged["w"]], ctx)}

    def _student(self, start: Tensor, teachers: list[Tensor], ctx: Ctx) -> Tensor:
        """A model from `start` on that learns, by KL, the teachers' mean probabilities on the server's data."""
        p, net, data, size = self.params, ctx.task.net, ctx.task.server_data(), ctx.protocol.batch_size
        assert data is not None
        with torch.no_grad():
            mean = torch.cat([self._mean_softmax(teachers, x, ctx) for x, _ in data.chunks(size)])
        targets = mean ** (1 / p.temperature)
        targets /= targets.sum(-1, keepdim=True)
        net.load(start)
        net.use_generator(ctx.rng("distill_dropout"))
        optimizer = torch.optim.SGD([net.vector], lr=p.distill_lr, momentum=0.9, fused=True)
        averaged, count = net.vector.clone(), 0
        batches = data.numbered().batches(size, ctx.rng("distill"), epochs=p.distill_epochs)
        for step, (x, numbers) in enumerate(batches, start=1):
            net.zero_grad()
            student = net.logits(x, training=True).log_softmax(-1)
            kl_div(student, targets[numbers], reduction="batchmean").backward()
            optimizer.step()
            if step >= p.swa_start and (step - p.swa_start) % p.swa_every == 0:
                count += 1
                averaged.lerp_(net.vector, 1 / count)
        return averaged if count else net.vector.detach().clone()

    def _draw(self, start: Tensor, clients: list[Upload], ctx: Ctx) -> Tensor:
        """M models from the distribution over the clients', which count as in the average."""
        p = self.params
        models = torch.stack([upload.message["w"] for upload in clients])
        weights = torch.tensor([weight_of(upload, ctx) for upload in clients], device=start.device)
        weights /= weights.sum()
        if p.posterior == "gaussian":
            drawn = gaussian_draws(
                start,
                models,
                weights,
                ctx.task.net.tensors,
                p.M,
                var_floor=p.var_floor,
                noise_scale=p.noise_scale,
                generator=ctx.rng("ensemble"),
            )
        else:
            drawn = dirichlet_draws(models, weights, p.M, p.concentration, numpy_rng(ctx.seed, "ensemble", ctx.round))
        return drawn if ctx.protocol.beta == 1.0 else torch.lerp(start, drawn, ctx.protocol.beta)

    def predicts_by_sampling(self) -> bool:
        return False

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """A personal model by itself; of the global one the mean softmax of its members, whatever the mode."""
        if "ensemble" not in model:
            return super().predict(model, x, ctx, mode)
        members = [*model["ensemble"], model["w"]] if self.params.include_mean else [*model["ensemble"]]
        return self._mean_softmax(members, x, ctx)

    def _mean_softmax(self, members: list[Tensor], x: Tensor, ctx: Ctx) -> Tensor:
        return torch.stack([super(FedBE, self).predict({"w": w}, x, ctx, "mean") for w in members]).mean(0)

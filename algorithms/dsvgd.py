"""DSVGD: particles travel from client to client, each moving them by Stein variational gradient descent (KSD, HIP).

A visit moves the particles towards  log q - log t_k + log p_k,  and the client's own towards the new factor t_k.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedbench.algorithm import Algorithm, Cohort, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.errors import FedbenchError
from fedbench.models.bayesian import ParticleModel
from fedbench.rng import numpy_rng
from fedbench.stein import Bandwidth, Kde, MedianForm, Svgd, v_statistic
from fedbench.task import ClientData, Task
from fedbench.training import learning_rate, local_batches

INITIAL_SAMPLES = 1000
"""On which a network's noise precision is fitted before training."""


class DsvgdParams(Params):
    selection: Literal["round_robin", "random", "ksd", "hip", "parallel"] = Field(
        "round_robin", description="who is visited: one client a round, whatever f is; parallel: f N of them at once"
    )
    n_particles: int | None = Field(None, ge=1, description="P; default: 20 for bnn100, else 6")
    local_steps: int = Field(10, ge=0, description="L', steps of a client's own particles (L is tau, the step size lr)")
    server_steps: int = Field(50, ge=0, description="L_g, steps of the server's particles with selection parallel")
    fudge: float = Field(1e-6, gt=0, description="e in the step a phi / (e + sqrt(G)); 1e-9 for logistic regression")
    median: Literal["paper", "code"] = Field(
        "paper", description="bandwidth: med^2 / log P, or as the code: over log(P + 1), self-distances in the median"
    )
    kde: Literal["code", "log"] = Field(
        "code", description="densities of particles: with the code's floors, which leave nothing of them, or exact"
    )
    kde_bandwidth: float = Field(0.55, gt=0, description="standard deviation of the density estimate's kernel")
    ksd_kernel: Literal["rbf_median", "gauss055"] = Field(
        "rbf_median", description="kernel of the KSD: median bandwidth, or a Gaussian of deviation 0.55"
    )
    poll_data: Literal["batch", "all"] = Field(
        "batch", description="samples behind a polled score: one mini-batch, or all that the client has"
    )
    negative_hip: Literal["clip", "shift"] = Field(
        "clip", description="negative inner products: to 0, or all shifted by the smallest"
    )
    gamma: Literal["rate", "scale"] = Field("rate", description="what b of the prior Gamma(1, b) of a precision is")
    bnn_likelihood: Literal["gaussian", "categorical"] = Field(
        "gaussian", description="of a network with a noise precision (bnn100); other networks are categorical"
    )
    particle_accuracy: Literal["last", "always"] = Field(
        "last", description="when the mean accuracy of single particles is recorded: last round, every evaluation"
    )
    log_precision_bound: float = Field(10.0, gt=0, description="log precisions stay within plus and minus this")


class Dsvgd(Algorithm):
    """`particles` [P, d]: the server's, and a client's own, whose density stands for p_0 t_k.

    L steps with batches of b samples are the protocol's tau, local_unit and batch_size; the step size is its lr.
    Arithmetic is in float64; what is sent or kept is float32.
    """

    title = "DSVGD"
    Params = DsvgdParams
    defaults: ClassVar = {"local_unit": "batch", "tau": 10, "batch_size": 100, "lr": 0.001}

    def __init__(self, params: DsvgdParams) -> None:
        super().__init__(params)
        self._start: tuple[Task, int, Tensor] | None = None

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError for running statistics, and for a parallel run in which no client could be heard."""
        if ctx.task.net.keeps_statistics:
            raise FedbenchError("DSVGD has no gradient for running statistics.", "Use norm bn_nostats or gn.")
        start = self._initial(ctx)
        if self.params.selection == "parallel" and self._kde(start).is_flat:
            raise FedbenchError(
                f"in {start.shape[1]} dimensions kde=code is a constant: parallel clients could tell nothing.",
                "Set kde=log.",
            )
        return {"particles": start}

    def init_client(self, ctx: Ctx) -> State:
        return {"particles": self._initial(ctx)}

    def polls(self) -> bool:
        return self.params.selection in ("ksd", "hip")

    def poll(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> Message | None:
        """KSD: how far the particles are from this client's tilted density. HIP: gradients of log p_k at them."""
        particles, model = down["particles"].double(), self._model(ctx)
        size = data.n if self.params.poll_data == "all" else ctx.protocol.batch_size
        x, y = next(data.batches(size, ctx.rng("poll"), steps=1))
        if self.params.selection == "hip":
            return {"scores": model.likelihood_score(particles, x, y, data.n)}
        q, t = self._kde(particles), self._kde(memory["particles"].double())
        score = q.score(particles) - t.score(particles) + model.score(particles, x, y, data.n)
        return {"ksd": v_statistic(particles, score, score, self._ksd_bandwidth)}

    def select(self, server: State, polls: Mapping[int, Message], ctx: Ctx) -> Cohort:
        """One client, in turn or drawn with the probabilities that the answers give; parallel: f N clients."""
        if self.params.selection == "parallel":
            return super().select(server, polls, ctx)
        everyone = ctx.task.members
        if self.params.selection == "round_robin":
            chosen = everyone[(ctx.round - 1) % len(everyone)]
        else:
            weights = self.probabilities(server, polls, ctx)
            chosen = everyone[numpy_rng(ctx.seed, "cohort", ctx.round).choice(len(everyone), p=weights)]
        return Cohort(train=(chosen,), report=(chosen,))

    def probabilities(self, server: State, polls: Mapping[int, Message], ctx: Ctx) -> NDArray[np.float64]:
        """P_k of the clients that may be drawn."""
        everyone = ctx.task.members
        if self.params.selection == "random":
            return np.full(len(everyone), 1 / len(everyone))
        if self.params.selection == "ksd":
            return shares([float(polls[client]["ksd"]) for client in everyone])
        return shares(
            inner_products(
                server["particles"].double(), [polls[client]["scores"] for client in everyone], self.params.median
            ),
            self.params.negative_hip,
        )

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        model = self._model(ctx)
        q_before, t_before = self._kde(down["particles"].double()), self._kde(memory["particles"].double())
        particles, svgd = q_before.centres, self._svgd(ctx)
        for x, y in local_batches(data, ctx):
            # the density of the client's own particles holds p_0, which the model's score gives back
            tilted = q_before.score(particles) - t_before.score(particles) + model.score(particles, x, y, data.n)
            particles = model.clamped(svgd.step(particles, tilted))

        q_after = self._kde(particles)
        own, svgd = t_before.centres, self._svgd(ctx)
        for _ in range(self.params.local_steps):
            factor = q_after.score(own) - q_before.score(own) + t_before.score(own)
            own = model.clamped(svgd.step(own, factor))
        sent = own if self.params.selection == "parallel" else particles
        return {"particles": sent.float()}, {"particles": own.float()}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """The visited client's particles; parallel: the server's, moved towards p_0 prod_k (p_0 t_k) / p_0."""
        received = [upload.message["particles"] for upload in uploads]
        if self.params.selection != "parallel":
            (particles,) = received
            return {"particles": particles}
        model, svgd, factors = self._model(ctx), self._svgd(ctx), self._kde(torch.stack(received).double())
        particles = server["particles"].double()
        for _ in range(self.params.server_steps):
            score = factors.score(particles) - (len(received) - 1) * model.prior_score(particles)
            particles = model.clamped(svgd.step(particles, score))
        return {"particles": particles.float()}

    def predicts_by_sampling(self) -> bool:
        return False

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """The ensemble's probabilities; the particles are all there is, so that both modes are the same."""
        return self._model(ctx).probabilities(model["particles"], x)

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """The mean accuracy of single particles (the DSVGD code's figure for networks), as dear as a prediction."""
        if ctx.round < ctx.rounds and self.params.particle_accuracy == "last":
            return {}
        tests = ctx.task.split.test
        first, *others = ctx.task.members
        one_for_all = all(tests[client] is tests[first] for client in others)
        right, n = 0.0, 0
        with torch.no_grad():
            for x, y in ctx.task.test_data(*((first,) if one_for_all else ctx.task.members)).chunks(2048):
                guesses = self._model(ctx).outputs(model["particles"], x).argmax(-1)
                right, n = right + float((guesses == y).sum()), n + guesses.numel()
        return {"particle_accuracy": right / n} if n else {}

    def _initial(self, ctx: Ctx) -> Tensor:
        """The particles that everybody starts from. Kept, because the engine asks anew for clients without memory."""
        if self._start is None or self._start[:2] != (ctx.task, ctx.seed):
            begin, model = ctx.at(None), self._model(ctx)
            x, y = next(ctx.task.train_data(*ctx.task.members).batches(INITIAL_SAMPLES, begin.rng("noise"), steps=1))
            count = self.params.n_particles or (20 if model.has_noise else 6)
            self._start = ctx.task, ctx.seed, model.initial(count, x, y, begin.rng("particles", on_cpu=True))
        return self._start[2]

    def _model(self, ctx: Ctx) -> ParticleModel:
        params = self.params
        return ParticleModel(
            ctx.task.net, params.bnn_likelihood == "gaussian", params.gamma, params.log_precision_bound
        )

    def _kde(self, centres: Tensor) -> Kde:
        return Kde(centres, self.params.kde_bandwidth, self.params.kde)

    def _svgd(self, ctx: Ctx) -> Svgd:
        return Svgd(learning_rate(ctx), self.params.fudge, self.params.median)

    @property
    def _ksd_bandwidth(self) -> Bandwidth:
        median: MedianForm = self.params.median
        return median if self.params.ksd_kernel == "rbf_median" else 2 * 0.55**2


def inner_products(particles: Tensor, scores: Sequence[Tensor], bandwidth: Bandwidth = "paper") -> list[float]:
    """H_k, the Hilbert inner product of every client's gradients with the mean of all."""
    mean = torch.zeros_like(particles)
    for score in scores:
        mean.add_(score, alpha=1 / len(scores))
    return [float(v_statistic(particles, score.to(mean), mean, bandwidth)) for score in scores]


def shares(values: Iterable[float], negative: Literal["clip", "shift"] = "clip") -> NDArray[np.float64]:
    """Values as probabilities: negative ones count 0, or the smallest does; all alike if nothing is left."""
    weights = np.array(list(values), dtype=np.float64)
    weights = weights.clip(min=0) if negative == "clip" else weights - weights.min()
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1 / len(weights))

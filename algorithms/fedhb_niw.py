"""FedHB-NIW: clients are draws from a Gaussian whose mean and variance have a Normal-Inverse-Wishart posterior.

phi = (mu, Sigma) ~ NIW(m_0, V_0, l_0, n_0),   theta_i | phi ~ N(mu, Sigma),   q_i(theta_i): columns of m_i, or 0
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedbench.algorithm import Algorithm, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.errors import FedbenchError
from fedbench.models.network import Network
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    backward,
    extrapolate,
    local_batches,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
    weight_of,
)

Dimension = Literal["coordinate", "paper"]


@dataclass(frozen=True)
class Niw:
    """The fixed numbers of the posterior, and what follows from them and the server's S, where V_0 is a multiple of S.

    `dim` is d as it is read: 1 takes the posterior coordinate by coordinate, else it is the length of the vector.
    """

    clients: int
    samples: int
    dim: int

    @property
    def l0(self) -> int:
        return self.samples + 1

    @property
    def n0(self) -> int:
        return self.samples + self.dim + 2

    @property
    def df(self) -> int:
        """Degrees of freedom of the predictive Student t, n_0 - d + 1."""
        return self.samples + 3

    def v0(self, spread: Tensor) -> Tensor:
        """V_0 = n_0 / (N + d + 2) S."""
        return spread * (self.n0 / (self.clients + self.dim + 2))

    def penalty(self, spread: Tensor, keep: float) -> Tensor:
        """Coefficient c of the clients' penalty (c/2) (m - m_0)^2 at sum scale: p (n_0 + d + 1) / V_0."""
        return keep * (self.n0 + self.dim + 1) / self.v0(spread)

    def t_scale(self, spread: Tensor) -> Tensor:
        """Squared scale of the predictive Student t: (l_0 + 1) V_0 / (l_0 (n_0 - d + 1))."""
        return self.v0(spread) * ((self.l0 + 1) / (self.l0 * self.df))


def shrunk_mean(mean: Tensor, clients: int, keep: float) -> Tensor:
    """m_0 = p / (N + 1) times the sum over all clients, of whom `mean` is the average."""
    return mean * (keep * clients / (clients + 1))


def spread(m0: Tensor, mean: Tensor, second: Tensor, clients: int, keep: float, eps: float) -> Tensor:
    """S = 1 + N eps^2 + m_0^2 + sum_i rho_i from the clients' mean and second moment; never below 1.

    rho_i = p m_i^2 - 2 p m_0 m_i + m_0^2 = p (m_i - m_0)^2 + (1 - p) m_0^2.
    """
    rho = keep * (second - 2 * m0 * mean) + m0**2
    return 1 + clients * eps**2 + m0**2 + clients * rho


def proximal_pull(coefficient: Tensor, step: float) -> Tensor:
    """How much of the way to m_0 a proximal step goes: m <- (m + e c m_0) / (1 + e c)."""
    return (step * coefficient) / (1 + step * coefficient)


def student_t(location: Tensor, squared_scale: Tensor, df: int, generator: torch.Generator) -> Tensor:
    """A draw from the multivariate Student t: one chi-squared number is common to all coordinates."""
    device = generator.device
    z = torch.randn(location.shape, generator=generator, device=device)
    chi2 = torch.randn(df, generator=generator, device=device, dtype=torch.float64).square().sum()
    return location + squared_scale.sqrt() * z * (df / chi2).sqrt().float()


def backward_at(point: Tensor, vector: Tensor, net: Network, x: Tensor, y: Tensor) -> None:
    """Leave in the network the gradient of the batch's loss with `point` in the place of `vector`, a part of it."""
    own = vector.clone()
    vector.copy_(point)
    backward(net, x, y)
    vector.copy_(own)


class FedHBNIWParams(Params):
    penalty_dim: Dimension = Field(
        "coordinate", description="d of the clients' penalty: 1, or the number of parameters (not trainable)"
    )
    sample_dim: Dimension = Field(
        "paper", description="d of the Student t: the number of parameters, or 1 (destroys the network)"
    )
    update: Literal["proximal", "proximal_momentum", "explicit"] = Field(
        "proximal",
        description="penalty: proximal step at rate lr or lr / (1 - momentum), or its gradient (lr * c below 2)",
    )
    shrink: bool = Field(True, description="server: p N/(N+1) times the average of the clients; false: the average")
    eps: float = Field(1e-4, ge=0, description="standard deviation of a client's spiky Gaussians")
    p: float = Field(0.999, gt=0, le=1, description="probability to keep a weight column, 1 - drop probability")
    prediction: Literal["student_t", "mean"] = Field(
        "student_t", description="global model: one draw from the predictive Student t, or m_0"
    )


class FedHBNIW(Algorithm):
    """The server's state is m_0 (`w`) and S (`spread`), from which V_0 follows in either reading of d."""

    title = "FedHB-NIW"
    Params = FedHBNIWParams
    # every round shrinks m_0 by p N/(N+1): at a small rate the clients do not make up for it
    defaults: ClassVar = {"weighting": "uniform", "lr": 0.1, "momentum": 0.9}

    def init_server(self, ctx: Ctx) -> State:
        """The server's formula for clients that all are where the network starts."""
        if ctx.task.net.keeps_statistics:
            raise FedbenchError("fedhb_niw has no posterior for running statistics.", "Use norm bn_nostats or gn.")
        w = ctx.task.initial
        return {"w": w, "spread": self._spread(w, w, w.double().square(), ctx)}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        net = ctx.task.net
        net.load(down["w"])
        optimizer = make_optimizer(net.vector, ctx)
        restore_optimizer(optimizer, memory, "optimizer.")
        self._descend(net.vector, down, data.n, local_batches(data, ctx), optimizer, ctx.rng("columns"), ctx)
        return {"w": net.vector.detach().clone()}, optimizer_state(optimizer, ctx, "optimizer.")

    def _descend(
        self,
        vector: nn.Parameter,
        prior: State,
        n: int,
        batches: Iterable[tuple[Tensor, Tensor]],
        optimizer: torch.optim.Optimizer,
        columns: torch.Generator,
        ctx: Ctx,
        fixed: slice | None = None,
    ) -> None:
        """Steps on CE(m~; B) + (c/2) (m - m_0)^2, where m~ is m with some columns dropped.

        m is the trained part of `vector`; a head that was frozen comes after it, without columns and penalty. `fixed`
        is what does not move.
        """
        p, net, grad = self.params, ctx.task.net, vector.grad
        assert grad is not None
        m, m0, grad_m = vector[: net.d], prior["w"], grad[: net.d]
        c = self._niw(p.penalty_dim, ctx).penalty(prior["spread"], p.p) / n  # at mean scale
        rate = optimizer.param_groups[0]["lr"]
        pull = proximal_pull(c, rate / (1 - ctx.protocol.momentum) if p.update == "proximal_momentum" else rate)
        for x, y in batches:
            kept = self._kept_columns(columns, ctx)
            backward_at(m * kept, m, net, x, y)
            grad_m.mul_(kept)
            if p.update == "explicit":
                grad_m.addcmul_(c, m - m0)
            if fixed is not None:
                grad[fixed] = 0.0
            optimizer.step()
            if p.update != "explicit":
                m.lerp_(m0, pull)

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        total, mean, second = 0.0, torch.zeros(()), torch.zeros(())
        for upload in uploads:  # float64: S is a difference of second moments
            weight, m = weight_of(upload, ctx), upload.message["w"].double()
            total += weight
            mean = mean + weight * m
            second = second + weight * m**2
        if not total:
            return server
        mean, second = mean / total, second / total
        closed = shrunk_mean(mean, len(ctx.task.members), self.params.p) if self.params.shrink else mean
        m0 = extrapolate({"w": server["w"]}, {"w": closed.float()}, ctx)["w"]
        return {"w": m0, "spread": self._spread(m0, mean, second, ctx)}

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """m after so many epochs of the client's own objective from m_0, with a head that was frozen trained along."""
        if epochs is None:
            return None
        net, protocol = ctx.task.net, ctx.protocol
        net.load(net.extended(server["w"]))
        net.use_generator(ctx.rng("adapt_dropout"))
        optimizer = make_optimizer(net.whole, ctx, adapt_rate(ctx))
        batches = data.batches(protocol.batch_size, ctx.rng("adapt"), epochs=epochs)
        fixed = net.body if protocol.adapt_part == "head" else None
        self._descend(net.whole, server, data.n, batches, optimizer, ctx.rng("adapt_columns"), ctx, fixed)
        return {"w": net.whole.detach().clone()}

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """The norm of m_0, which every round shrinks."""
        return {"norm_m0": float(model["w"].double().norm())} if "spread" in model else {}

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """Personal models are points. The global one is drawn once (mean) or `mc_samples` times, alike for everyone."""
        if "spread" not in model or (mode == "mean" and self.params.prediction == "mean"):
            return super().predict(model, x, ctx, mode)
        niw, net, draws = self._niw(self.params.sample_dim, ctx), ctx.task.net, ctx.at(None).rng("student_t")
        samples = 1 if mode == "mean" else ctx.protocol.mc_samples
        squared_scale, total = niw.t_scale(model["spread"]), torch.zeros(())
        for _ in range(samples):
            net.load(student_t(model["w"], squared_scale, niw.df, draws))
            total = total + net.logits(x).softmax(-1)
        return total / samples

    def _kept_columns(self, generator: torch.Generator, ctx: Ctx) -> Tensor | float:
        """1 at what is kept, 0 in dropped columns; biases and normalisation parameters are always kept."""
        if self.params.p == 1:
            return 1.0
        columns = ctx.task.net.input_columns
        drawn = torch.rand(int(columns.max()) + 1, generator=generator, device=columns.device)
        keep = drawn.lt(self.params.p).float()
        keep[0] = 1.0
        return keep[columns]

    def _spread(self, m0: Tensor, mean: Tensor, second: Tensor, ctx: Ctx) -> Tensor:
        p = self.params
        return spread(m0.double(), mean.double(), second, len(ctx.task.members), p.p, p.eps).float()

    def _niw(self, dimension: Dimension, ctx: Ctx) -> Niw:
        members = ctx.task.members
        samples = sum(ctx.sizes[client] for client in members)
        return Niw(len(members), samples, 1 if dimension == "coordinate" else ctx.task.net.d)

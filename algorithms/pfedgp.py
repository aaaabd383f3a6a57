"""pFedGP: a common embedding network; every client classifies by a tree of Gaussian processes on its own data.

Only the network's body travels. A client splits its classes in two until they are single, and at every split a binary
Gaussian process tells the sides apart; a class has the product of the probabilities on its way. Training makes the
embedding one in which half of a split's points predict the other half.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from fedbench.algorithm import Algorithm, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.errors import FedbenchError
from fedbench.gp import Kernel, Posterior, class_tree, gibbs, part_of_each, predictive, probability
from fedbench.task import ClientData
from fedbench.training import average, make_optimizer, optimizer_state, restore_optimizer

BLOCK = 256
"""Test points that are predicted at once: with all chains they fit the cache, which makes them twice as fast."""


class PFedGPParams(Params):
    output_scale: float = Field(8.0, gt=0, description="variance of the Gaussian processes")
    length_scale: float = Field(1.0, gt=0, description="length scale of the RBF kernel, on embeddings of length 1")
    jitter: float = Field(1e-3, gt=0, description="added to the kernel's diagonal")
    gibbs_steps: int = Field(5, ge=1, description="Gibbs steps of every chain")
    chains: int = Field(20, ge=1, description="parallel Gibbs chains in training")
    test_chains: int = Field(30, ge=1, description="parallel Gibbs chains of a personal model")
    pg_terms: int = Field(20, ge=1, description="terms of a Polya-Gamma draw; the rest enters by its mean")
    held_out: float = Field(0.5, gt=0, lt=1, description="part of a split's points that the others are to predict")
    max_points: int = Field(1000, ge=2, description="a Gaussian process sees at most so many points, drawn at random")
    quadrature: int = Field(20, ge=1, description="points of the Gauss-Hermite quadrature")
    likelihood: Literal["expected", "code"] = Field(
        "expected", description="probability of a side: E[sigmoid(f)], or exp(E[log sigmoid(f)]) as in public code"
    )
    tree_loss: Literal["mean", "sum"] = Field(
        "mean", description="loss of a tree: mean over its splits, or their sum as in public code"
    )
    clip: float = Field(50.0, gt=0, description="largest norm of a gradient")


class PFedGP(Algorithm):
    """A step is on all local data, so a round has tau steps (one by default) and batch_size is not used.

    A personal model is rebuilt from the client's training data: the embeddings `x` with labels `y`, the splits `tree`,
    and `omega` [splits, chains, points], which is 0 where a split does not see the point.
    """

    title = "pFedGP"
    Params = PFedGPParams
    defaults: ClassVar = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "tau": 1, "weighting": "uniform"}

    def init_server(self, ctx: Ctx) -> State:
        body = ctx.task.net.body
        if body.stop == 0:
            raise FedbenchError("pFedGP shares the body, and a single layer has none.", "Use a deeper network.")
        return {"phi": ctx.task.initial[body].clone()}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        if ctx.novel:  # a newcomer has nothing to learn: its Gaussian processes are its data
            return down, memory
        net, phi, tree = ctx.task.net, _loaded(down["phi"], ctx), None
        optimizer, rng = make_optimizer(phi, ctx), ctx.rng("gibbs")
        restore_optimizer(optimizer, memory, "optimizer.")
        for x, y in data.batches(max(1, data.n), ctx.rng("batches"), steps=ctx.protocol.tau):
            net.zero_grad()
            embeddings = net.features(x, training=True)
            tree = class_tree(embeddings.detach(), y, ctx.task.classes) if tree is None else tree
            losses = [loss for split in tree if (loss := self._loss(embeddings, split[y], rng)) is not None]
            if losses:  # else there is nothing to tell apart, or too little
                total = torch.stack(losses)
                (total.mean() if self.params.tree_loss == "mean" else total.sum()).backward()
                clip_grad_norm_([phi], self.params.clip)
                optimizer.step()
        return {"phi": phi.detach().clone()}, optimizer_state(optimizer, ctx, "optimizer.")

    def _loss(self, embeddings: Tensor, side: Tensor, rng: torch.Generator) -> Tensor | None:
        """Cross-entropy of the points that a split holds out, given its others; None if it holds out none."""
        p, points = self.params, self._points(side, rng)
        held_out = part_of_each(side[points], p.held_out, rng)
        known, new = points[~held_out], points[held_out]
        if not len(new):
            return None
        kernel, kappa = self._kernel(side.device), side[known].double() / 2
        k, cross = kernel(embeddings[known]), kernel.between(embeddings[known], embeddings[new])
        f = predictive(k, cross, kernel.variance, kappa, self._omega(k.detach(), kappa, p.chains, rng))
        of_first = probability(*f, p.quadrature, p.likelihood).mean(0)
        of_label = torch.where(side[new] > 0, of_first, 1 - of_first)
        return -of_label.clamp_min(1e-12).log().mean()

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return average(server, uploads, ctx)

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        return None

    @torch.no_grad()
    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The tree on the client's training data, under the server's embedding. There is nothing to adapt."""
        chains, rng, y = self.params.test_chains, ctx.rng("gibbs_of_personal_model"), data.y
        _loaded(server["phi"], ctx)
        x, kernel = ctx.task.net.features(data.x), self._kernel(y.device)
        tree = class_tree(x, y, ctx.task.classes)
        omega = torch.zeros(len(tree), chains, len(y), dtype=torch.float64, device=y.device)
        for split, drawn in zip(tree, omega, strict=True):
            points = self._points(split[y], rng)
            drawn[:, points] = self._omega(kernel(x[points]), split[y[points]].double() / 2, chains, rng)
        return {"phi": server["phi"], "x": x, "y": y, "tree": tree, "omega": omega}

    def predicts_by_sampling(self) -> bool:
        return False

    @torch.no_grad()
    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """The product along every class's way, averaged over the chains at each split; the mode makes no difference."""
        p, kernel = self.params, self._kernel(x.device)
        _loaded(model["phi"], ctx)
        new = ctx.task.net.features(x).split(BLOCK)
        known = torch.zeros(ctx.task.classes, dtype=torch.float64, device=x.device)
        known[model["y"]] = 1.0  # of other classes a client knows nothing
        probabilities = known.repeat(len(x), 1)
        for split, omega in zip(model["tree"], model["omega"], strict=True):
            points = omega[0].nonzero().squeeze(-1)
            embeddings, kappa = model["x"][points], split[model["y"][points]].double() / 2
            posterior = Posterior(kernel(embeddings), kappa, omega[:, points])
            f = [posterior.at(kernel.between(embeddings, block), kernel.variance) for block in new]
            of_first = torch.cat([probability(*moments, p.quadrature, p.likelihood).mean(0) for moments in f])
            probabilities[:, split > 0] *= of_first.unsqueeze(-1)
            probabilities[:, split < 0] *= 1 - of_first.unsqueeze(-1)
        return probabilities.float()

    def _omega(self, k: Tensor, kappa: Tensor, chains: int, rng: torch.Generator) -> Tensor:
        return gibbs(k, kappa, chains, self.params.gibbs_steps, self.params.pg_terms, rng)

    def _points(self, side: Tensor, rng: torch.Generator) -> Tensor:
        """The positions of the points that a split sees: all on either side, or `max_points` of them."""
        points = side.nonzero().squeeze(-1)
        if len(points) <= self.params.max_points:
            return points
        return points[part_of_each(side[points], self.params.max_points / len(points), rng, at_least=1)]

    def _kernel(self, device: torch.device) -> Kernel:
        return Kernel(self.params.output_scale, self.params.length_scale, self.params.jitter, device)


def _loaded(phi: Tensor, ctx: Ctx) -> torch.nn.Parameter:
    """The body of the process's network with these values and its gradient."""
    net = ctx.task.net
    body = net.part_of_whole(net.body)
    body.copy_(phi)
    return body

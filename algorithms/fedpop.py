"""FedPop (FedSOUL): clients sample their own heads by Langevin steps; the body follows gradients averaged over them.

max_{phi, beta} sum_i log E_{z ~ p(z | beta)}[p(D_i | phi, z)],   phi: the body, z_i: client i's head, beta: its prior
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import sqrt
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import softplus

from fedbench.algorithm import Ctx, Message, Params, PredictMode, State, Upload
from fedbench.bayes import RHO_RANGE
from fedbench.errors import FedbenchError
from fedbench.partly_shared import PartlyShared, joined
from fedbench.task import ClientData
from fedbench.training import (
    adapt_rate,
    adjusted,
    backward,
    extrapolate,
    learning_rate,
    local_batches,
    local_steps,
    make_optimizer,
    optimizer_state,
    restore_optimizer,
    weight_of,
)

Batches = Iterable[tuple[Tensor, Tensor]]


class FedPopParams(Params):
    burn_in: float = Field(0.5, ge=0, lt=1, description="first part of a round's steps, of which no sample is retained")
    retained: int = Field(5, ge=1, description="samples of a round that a client retains, at most, evenly spaced")
    langevin_noise: bool = Field(True, description="z samples its posterior; false: z descends to its mode (code)")
    head_optimizer: Literal["protocol", "rmsprop"] = Field(
        "protocol", description="steps of z: the protocol's optimizer, or RMSprop (code; not with Langevin noise)"
    )
    prediction: Literal["samples", "last"] = Field(
        "samples", description="mean softmax over the retained samples, or the last of them (code)"
    )
    prior: Literal["fixed", "learned"] = Field(
        "fixed", description="prior of z: N(0, softplus(prior_rho)^2), or learned from there on; it then travels too"
    )
    prior_rho: float = Field(
        0.54, ge=-12, le=5, description="rho of the prior of z, at first; softplus(0.54) = 0.99916"
    )
    lr_prior: float = Field(0.01, gt=0, description="server's rate for a learned prior (code: 0.1 and falling)")
    body_update: Literal["parallel", "sequential"] = Field(
        "parallel",
        description="body: the server steps once along the clients' mean gradient; or each client steps, once per "
        "retained sample, and hands body and optimiser on to the next (code)",
    )
    body_optimizer: Literal["adam", "sgd", "rmsprop"] = Field("adam", description="server's steps of body and prior")
    lr_body: float = Field(0.001, gt=0, description="server's rate for the body")
    body_prior: float | None = Field(
        None, gt=0, description="standard deviation of a Gaussian prior of the body; default: a flat one (code)"
    )

    @model_validator(mode="after")
    def _noise_fits(self) -> FedPopParams:
        if self.langevin_noise and self.head_optimizer == "rmsprop":
            raise ValueError("head_optimizer rmsprop needs langevin_noise false: its steps have other noise")
        return self


class FedPop(PartlyShared):
    """A round's local work is the chain, one step per mini-batch: M = 10, M0 = 5 is `tau: 10` with `local_unit: batch`.

    A batch stands for D_i wherever the algorithm has the client's data, in the chain and, a further batch for each
    retained sample, in the body's gradient; with batches of n_i samples they are the algorithm's own, full gradients.
    The rate `lr` is n_i g: losses are means (specification, 1.1), and so is the gradient of the body that travels.

    A client's memory is its retained samples, of which the last is the chain's state. The server keeps the history of
    its optimiser, which does not travel.
    """

    title = "FedPop"
    Params = FedPopParams
    defaults: ClassVar = {"lr": 0.05}

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError where a step would not be a Langevin step, or the body not all parameters."""
        protocol = ctx.protocol
        if self.params.langevin_noise and (protocol.optimizer != "sgd" or protocol.momentum or protocol.weight_decay):
            raise FedbenchError(
                "FedPop samples by plain gradient steps with noise.",
                "Set optimizer=sgd, momentum=0 and weight_decay=0, or langevin_noise=false.",
            )
        if ctx.task.net.keeps_statistics:
            raise FedbenchError("FedPop has no gradient for running statistics.", "Use norm bn_nostats or gn.")
        state = super().init_server(ctx)
        if self.params.prior == "learned":
            state["prior"] = self._first_prior(ctx)
        return state

    def init_client(self, ctx: Ctx) -> State:
        return {"samples": super().init_client(ctx)["own"][None]}

    def download(self, server: State, ctx: Ctx) -> Message:
        return {key: value for key, value in server.items() if key in ("shared", "prior") or self._hands_on(key)}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        order, steps = ctx.rng("batches"), local_steps(data.n, ctx)
        batches = local_batches(data, ctx, rng=order)
        noise, rate = ctx.rng("langevin"), learning_rate(ctx)
        samples, history = self._chain({**down, **memory}, batches, steps, rate, noise, data.n, ctx)
        kept = {"samples": samples, **history}
        if ctx.novel:
            return {}, kept
        passes = len(samples) if self.params.body_update == "sequential" else 1
        further = data.batches(ctx.protocol.batch_size, order, steps=passes * len(samples))
        message = {"body_grad": self._body_gradient(down["shared"], samples, further, ctx)}
        if self.params.body_update == "sequential":
            message = self._body_steps(down, samples, message["body_grad"], further, ctx)
        if "prior" in down:
            message["prior_grad"] = log_prior_gradient(samples, down["prior"]).mean(0).neg_()
        return message, kept

    def _chain(
        self, state: State, batches: Batches, steps: int, rate: float, noise: torch.Generator, n: int, ctx: Ctx
    ) -> tuple[Tensor, State]:
        """The samples that are retained of so many steps from the last one of `state`, and the optimiser's history.

        z <- z - rate (grad CE(phi, z; B) - (1/n) grad log p(z | beta)) + sqrt(2 rate / n) xi
        """
        net, parts = ctx.task.net, self.parts(ctx)
        net.load(joined({"shared": state["shared"], "own": state["samples"][-1]}, parts))
        z, (mean, rho) = net.parameter(parts["own"]), state.get("prior", self._first_prior(ctx))
        precision = softplus(rho).square().reciprocal()
        optimizer = _optimizer(self.params.head_optimizer, z, rate, ctx)
        restore_optimizer(optimizer, state, "own.")
        wanted, samples = retained_steps(steps, self.params.burn_in, self.params.retained), []
        for step, (x, y) in enumerate(batches, 1):
            backward(net, x, y)
            net.grad[parts["own"]].addcmul_(z - mean, precision, value=1 / n)
            optimizer.step()
            if self.params.langevin_noise:
                z.add_(torch.randn(z.shape, generator=noise, device=z.device), alpha=sqrt(2 * rate / n))
            if step in wanted:
                samples.append(z.detach().clone())
        return torch.stack(samples) if samples else state["samples"], optimizer_state(optimizer, ctx, "own.")

    def _body_gradient(self, body: Tensor, samples: Tensor, batches: Batches, ctx: Ctx) -> Tensor:
        """-J_i / n_i: the mean over the samples of the gradient of CE(phi, z; B) over phi, a batch for each."""
        net, parts, mean = ctx.task.net, self.parts(ctx), torch.zeros_like(body)
        for z, (x, y) in zip(samples, islice(batches, len(samples)), strict=False):  # without data there are no batches
            net.load(joined({"shared": body, "own": z}, parts))
            backward(net, x, y)
            mean.add_(net.grad[parts["shared"]], alpha=1 / len(samples))
        return mean

    def _body_steps(self, down: Message, samples: Tensor, grad: Tensor, batches: Batches, ctx: Ctx) -> Message:
        """Body and history after a step per sample, the first along `grad`, each along the mean over all samples."""
        state = down
        for step in range(len(samples)):
            if step:
                grad = self._body_gradient(state["shared"], samples, batches, ctx)
            self._add_body_prior(grad, state["shared"], ctx)
            state = self._step(state, "shared", grad, self.params.lr_body, ctx)
        return state

    def _add_body_prior(self, grad: Tensor, body: Tensor, ctx: Ctx) -> None:
        """-(1/n) grad log p(phi) of a Gaussian prior."""
        if self.params.body_prior is not None:
            samples = sum(ctx.sizes[client] for client in ctx.task.members)
            grad.add_(body, alpha=1 / (samples * self.params.body_prior**2))

    def _hands_on(self, key: str) -> bool:
        """Whether this is what sequential clients hand on: the body and its optimiser's history."""
        return self.params.body_update == "sequential" and key.split(".")[0] == "shared"

    def relay(self, server: State, upload: Upload, ctx: Ctx) -> State:
        return server | {key: value for key, value in upload.message.items() if self._hands_on(key)}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """phi and beta, a step each: the mean loss and -log p(beta) / N - mean log p(z | beta), with p(beta) = N(0, I).

        These are the algorithm's sums over all clients, (N/m) sum_{S_t}, divided by the samples and by the clients.
        """
        p, total, clients, last = self.params, 0.0, 0, server
        body_grad, prior_grad = torch.zeros_like(server["shared"]), torch.zeros(())
        for upload in uploads:
            weight = weight_of(upload, ctx)
            total, clients = total + weight, clients + 1
            if p.body_update == "parallel":
                body_grad.add_(upload.message["body_grad"], alpha=weight)
            last = self.relay(last, upload, ctx)
            if p.prior == "learned":
                prior_grad = prior_grad + upload.message["prior_grad"]  # one z per client, however much data it has
        if not clients:
            return server
        merged = {key: value for key, value in last.items() if self._hands_on(key)}
        if p.body_update == "parallel":
            body_grad.div_(total)
            self._add_body_prior(body_grad, server["shared"], ctx)
            merged = self._step(server, "shared", body_grad, p.lr_body, ctx)
        if p.prior == "learned":
            prior_grad = prior_grad / clients + server["prior"] / len(ctx.task.members)
            merged |= self._step(server, "prior", prior_grad, p.lr_prior, ctx)
            merged["prior"][1].clamp_(*RHO_RANGE)
        return merged

    def _step(self, server: State, name: str, grad: Tensor, lr: float, ctx: Ctx) -> State:
        """One step of the server's optimiser: the new value, and its history."""
        kind = self.params.body_optimizer
        here = adjusted(ctx, optimizer=kind, lr=lr, momentum=0.0, weight_decay=0.0, optim_state="persistent")
        value = nn.Parameter(server[name].clone(), requires_grad=False)
        value.grad = grad
        optimizer = _optimizer(kind, value, learning_rate(here), here)
        restore_optimizer(optimizer, server, f"{name}.")
        optimizer.step()
        return extrapolate(server, {name: value.detach()}, ctx) | optimizer_state(optimizer, here, f"{name}.")

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The server's body with the client's retained samples; adapted: with those of a chain that goes on."""
        samples = memory["samples"]
        if epochs is not None:
            size = ctx.protocol.batch_size
            ctx.task.net.use_generator(ctx.rng("adapt_dropout"))
            batches, steps = data.batches(size, ctx.rng("adapt"), epochs=epochs), epochs * -(-data.n // size)
            state = {**self.download(server, ctx), "samples": samples}
            samples, _ = self._chain(state, batches, steps, adapt_rate(ctx), ctx.rng("adapt_noise"), data.n, ctx)
        return {"shared": server["shared"], "samples": samples}

    def predicts_by_sampling(self) -> bool:
        return False

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """The mean over samples of the head in either mode: they are all that is known of its posterior."""
        net, total = ctx.task.net, torch.zeros(())
        samples = model["samples"][-1:] if self.params.prediction == "last" else model["samples"]
        for z in samples:
            net.load(joined({"shared": model["shared"], "own": z}, self.parts(ctx)))
            total = total + net.logits(x).softmax(-1)
        return total / len(samples)

    def _first_prior(self, ctx: Ctx) -> Tensor:
        """beta: the means of z, and the rho of its standard deviations."""
        mean = torch.zeros_like(ctx.task.initial[self.parts(ctx)["own"]])
        return torch.stack([mean, torch.full_like(mean, self.params.prior_rho)])


def retained_steps(steps: int, burn_in: float, count: int) -> set[int]:
    """Which of the steps 1, 2, ... give the samples: evenly spaced after the burn-in, up to the last one."""
    left = steps - int(burn_in * steps)
    kept = min(count, left)
    return {steps - index * left // kept for index in range(kept)}


def log_prior_gradient(z: Tensor, prior: Tensor) -> Tensor:
    """The gradient of log N(z; mean, softplus(rho)^2) over the rows of `prior`, mean and rho; z may be several."""
    mean, rho = prior
    sigma = softplus(rho)
    score = (z - mean) / sigma
    return torch.stack([score / sigma, (score.square() - 1) / sigma * torch.sigmoid(rho)], dim=-2)


def _optimizer(kind: str, vector: nn.Parameter, rate: float, ctx: Ctx) -> torch.optim.Optimizer:
    """RMSprop, or the protocol's optimiser, without history."""
    return torch.optim.RMSprop([vector], lr=rate) if kind == "rmsprop" else make_optimizer(vector, ctx, rate)

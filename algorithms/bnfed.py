"""BNFed: the server finds out which hidden neurons of the clients are the same, and merges these (PFNM)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import linear

from fedbench.algorithm import Algorithm, Ctx, Message, Params, PredictMode, State, Upload
from fedbench.errors import FedbenchError
from fedbench.matching import LocalNeurons, Prior, match
from fedbench.models.network import Network
from fedbench.rng import numpy_rng
from fedbench.task import ClientData
from fedbench.training import adjusted, fine_tune, local_sgd


class BNFedParams(Params):
    gamma: float = Field(1.0, gt=0, description="mass of the process that opens global neurons (code: 1, 0.001, 50)")
    sigma: float = Field(1.0, gt=0, description="variance of local weights around global ones (code: 1, 0.5, 0.1)")
    sigma0: float = Field(1.0, gt=0, description="prior variance of global weights (code: 1, 10)")
    mu0: float = Field(0.0, description="prior mean of global weights")
    mu0_bias: float = Field(0.1, description="prior mean of global biases")
    sweeps: int = Field(5, ge=0, description="how often every client is taken out and matched again")
    max_width: int = Field(700, ge=1, description="largest number of global neurons")
    count_cap: int = Field(10, ge=1, description="a neuron that more clients use is no more attractive")
    count_weight: float = Field(
        1.0, ge=0, description="factor on the log odds that a neuron is used: 1 in the code, 2 in the posterior"
    )
    begin: Literal["own", "common"] = Field(
        "own", description="first round: every client has an initial network of its own, or all have the same"
    )
    round_decay: float = Field(0.99, gt=0, le=1, description="factor on lr after every round")
    send: Literal["matched", "global"] = Field(
        "matched", description="what travels down: the client's part of the global network, or all of it"
    )


class BNFed(Algorithm):
    """A neuron is a row: its input weights, its bias, its output weights.

    The server keeps the global `neurons` and the output `bias`, how many clients use each neuron (`counts`), and which
    ones each client uses (`assignment`, -1 where there are none). Only who reports in a round is matched in it.
    """

    title = "BNFed"
    Params = BNFedParams
    defaults: ClassVar = {"lr": 0.5}

    def init_server(self, ctx: Ctx) -> State:
        """Raises FedbenchError for a network that cannot be matched."""
        width = _width(ctx.task.net, self.params.max_width)
        neurons, bias = unpack(ctx.task.initial, ctx.task.net)
        used = torch.arange(width) if self.params.begin == "common" else torch.full((width,), -1)
        return {
            "neurons": neurons,
            "bias": bias,
            "counts": torch.zeros(width, dtype=torch.int64, device=neurons.device),
            "assignment": used.to(neurons.device).repeat(ctx.task.clients, 1),
        }

    def download(self, server: State, ctx: Ctx) -> Message:
        if _is_unmatched(server):
            return {"w": ctx.task.another_start(ctx.rng("begin", on_cpu=True))}
        used = neurons_of(server, ctx)
        if self.params.send == "global":
            return {"neurons": server["neurons"], "bias": server["bias"], "assignment": used}
        return {"w": pack(server["neurons"][used], server["bias"])}

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        start = down["w"] if "w" in down else pack(down["neurons"][down["assignment"]], down["bias"])
        rate = ctx.protocol.lr * self.params.round_decay ** (ctx.round - 1)
        w, kept = local_sgd(start, data, adjusted(ctx, lr=rate), memory)
        return {"w": w, "classes": torch.bincount(data.y, minlength=ctx.task.classes)}, kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        received = sorted(uploads, key=lambda upload: upload.client)
        if not received:
            return server
        cohort = [upload.client for upload in received]
        networks = [unpack(upload.message["w"].double(), ctx.task.net) for upload in received]
        # s_j of output weights: a client's share of all samples of the class; 0 where it has none
        classes = torch.stack([upload.message["classes"] for upload in received]).double()
        precisions = classes / classes.sum(0).clamp_min(1) / self.params.sigma

        clients = [self._local(neurons, s) for (neurons, _), s in zip(networks, precisions, strict=True)]
        start = None if _is_unmatched(server) else [neurons_of(server, ctx.at(i)).cpu().numpy() for i in cohort]
        rng = numpy_rng(ctx.seed, "matching", ctx.round)
        found = match(clients, self._prior(*networks[0]), self.params.sweeps, rng, start)

        assignment = torch.full_like(server["assignment"], -1)
        assignment[cohort] = torch.from_numpy(np.stack(found.assignments)).to(assignment)
        bias = self._output_bias(torch.stack([bias for _, bias in networks]), precisions)
        return {
            "neurons": torch.from_numpy(found.neurons).to(server["neurons"]),
            "bias": bias.to(server["bias"]),
            "counts": torch.from_numpy(found.counts).to(server["counts"]),
            "assignment": assignment,
        }

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The client's part of the global network, fine-tuned (+FT)."""
        if epochs is None:
            return None
        return {"w": fine_tune(pack(server["neurons"][neurons_of(server, ctx)], server["bias"]), data, ctx, epochs)}

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        return {"width": float(len(model["neurons"]))} if "neurons" in model else {}

    def predicts_by_sampling(self) -> bool:
        return False

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """By the task's network, or by the global one, whose width may change with every round."""
        if "w" in model:
            return super().predict(model, x, ctx, mode)
        into, own, out = columns(model["neurons"], len(model["bias"]))
        return linear(linear(x.flatten(1), into, own).relu_(), out.T, model["bias"]).softmax(-1)

    def _prior(self, neurons: Tensor, bias: Tensor) -> Prior:
        p, size = self.params, neurons.shape[1]
        mean = np.full(size, p.mu0)
        mean[-1 - len(bias)] = p.mu0_bias
        return Prior(mean, np.full(size, 1 / p.sigma0), p.gamma, p.count_weight, p.count_cap, p.max_width)

    def _local(self, neurons: Tensor, of_outputs: Tensor) -> LocalNeurons:
        of_inputs = torch.full_like(neurons[0, : -len(of_outputs)], 1 / self.params.sigma)
        return LocalNeurons(neurons.cpu().numpy(), torch.cat([of_inputs, of_outputs]).cpu().numpy())

    def _output_bias(self, biases: Tensor, precisions: Tensor) -> Tensor:
        """The same posterior mean, a class each; there is nothing to match."""
        s0, mu0 = 1 / self.params.sigma0, self.params.mu0_bias
        return torch.add((precisions * biases).sum(0), s0 * mu0).div_(s0 + precisions.sum(0))


def neurons_of(server: State, ctx: Ctx) -> Tensor:
    """The global neurons that a client trains: those it was matched to, or the most used ones if it was not.

    That goes for newcomers, and for who did not report in the last round: its neurons may not be there any more.
    """
    used = server["assignment"][ctx.client]
    return used if used[0] >= 0 else server["counts"].argsort(descending=True, stable=True)[: len(used)]


def columns(neurons: Tensor, n_outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Input weights, biases and output weights."""
    return neurons[:, : -1 - n_outputs], neurons[:, -1 - n_outputs], neurons[:, -n_outputs:]


def unpack(vector: Tensor, net: Network) -> tuple[Tensor, Tensor]:
    """The neurons of a network with one hidden layer, and its output bias."""
    into, own, out, bias = (vector[part] for part in net.tensors)
    width = len(own)
    return torch.cat([into.view(width, -1), own[:, None], out.view(-1, width).T], 1), bias


def pack(neurons: Tensor, bias: Tensor) -> Tensor:
    """The vector of the network with these neurons."""
    into, own, out = columns(neurons, len(bias))
    return torch.cat([into.flatten(), own, out.T.flatten(), bias])


def _is_unmatched(server: State) -> bool:
    """Whether every client has a network of its own: nothing was matched yet, and they did not begin alike."""
    return bool((server["assignment"] < 0).all())


def _width(net: Network, max_width: int) -> int:
    """The number of hidden neurons. Raises FedbenchError."""
    if [type(layer) for layer in net.module] != [nn.Flatten, nn.Linear, nn.ReLU, nn.Linear]:
        raise FedbenchError(
            "BNFed matches the neurons of exactly one hidden layer.",
            "Use model dnn100 or mlp256, or mlp3072 on images of 3x32x32.",
        )
    if net.d < net.flat.numel():
        raise FedbenchError(
            "BNFed matches neurons with their output weights, so it trains them.", "Set train_part=all."
        )
    width = len(range(net.d)[net.tensors[1]])  # one bias per neuron
    if width > max_width:
        raise FedbenchError(f"max_width is {max_width}, but every client has {width} hidden neurons.", "Raise it.")
    return width

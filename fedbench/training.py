"""Local training on the flat vector, and the server's average: shared by the methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbench.algorithm import Ctx, State, Upload
from fedbench.errors import FedbenchError
from fedbench.models.network import Network
from fedbench.task import ClientData

ExtraGrad = Callable[[Tensor, Tensor], None]
"""Adds a penalty's gradient: called with the parameters and, to be changed in place, their gradient."""


def adjusted(ctx: Ctx, **settings: Any) -> Ctx:
    """The same moment under a protocol with some other settings."""
    return replace(ctx, protocol=ctx.protocol.model_copy(update=settings))


def learning_rate(ctx: Ctx) -> float:
    """The rate of this round: `lr`, times `lr_decay` from rounds T/2 and 3T/4 on."""
    done = ctx.round - 1
    drops = (done >= ctx.rounds // 2) + (done >= 3 * ctx.rounds // 4)
    return ctx.protocol.lr * ctx.protocol.lr_decay**drops


def local_batches(
    data: ClientData, ctx: Ctx, work: int | None = None, rng: torch.Generator | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The mini-batches of one round of local work: tau epochs, or tau batches.

    A round of several phases says how much `work` a phase is, in place of tau, and hands all of them one generator.
    """
    protocol = ctx.protocol
    amount, order = protocol.tau if work is None else work, rng or ctx.rng("batches")
    if protocol.local_unit == "epoch":
        return data.batches(protocol.batch_size, order, epochs=amount)
    return data.batches(protocol.batch_size, order, steps=amount)


def local_steps(n: int, ctx: Ctx) -> int:
    """The number of mini-batches in a round of local work of a client with n samples."""
    protocol = ctx.protocol
    return protocol.tau * (-(-n // protocol.batch_size) if protocol.local_unit == "epoch" else 1)


def proximal(anchor: Tensor, weight: float) -> ExtraGrad:
    """The gradient of (weight/2) ||w - anchor||^2; the anchor is looked at in every step, so it may move."""

    def add(w: Tensor, grad: Tensor) -> None:
        grad.add_(w - anchor, alpha=weight)

    return add


def make_optimizer(vector: torch.nn.Parameter, ctx: Ctx, lr: float | None = None) -> torch.optim.Optimizer:
    """The protocol's optimiser on a flat vector, without history."""
    protocol = ctx.protocol
    rate = learning_rate(ctx) if lr is None else lr
    if protocol.weight_decay and ctx.task.net.keeps_statistics:
        raise FedbenchError("weight_decay would shrink running statistics.", "Use norm bn_nostats or gn, or no decay.")
    if protocol.optimizer == "adam":
        return torch.optim.Adam([vector], lr=rate, weight_decay=protocol.weight_decay, fused=True)
    return torch.optim.SGD(
        [vector], lr=rate, momentum=protocol.momentum, weight_decay=protocol.weight_decay, fused=True
    )


def restore_optimizer(optimizer: torch.optim.Optimizer, memory: State, prefix: str) -> None:
    """Put back the moments that `optimizer_state` took; nothing happens when the memory holds none."""
    kept = {key.removeprefix(prefix): value.clone() for key, value in memory.items() if key.startswith(prefix)}
    if kept:
        optimizer.state[optimizer.param_groups[0]["params"][0]] = kept


def optimizer_state(optimizer: torch.optim.Optimizer, ctx: Ctx, prefix: str) -> State:
    """The moments as client state, where the protocol keeps them over rounds; else nothing."""
    if ctx.protocol.optim_state == "reset":
        return {}
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    return {prefix + key: value for key, value in state.items() if isinstance(value, Tensor)}


def backward(net: Network, x: Tensor, y: Tensor) -> Tensor:
    """The network's loss on the batch; its gradient is left in `net.grad`."""
    net.zero_grad()
    loss = net.loss(x, y)
    loss.backward()
    return loss.detach()


def gradient(net: Network, x: Tensor, y: Tensor, factor: float, vector: Tensor) -> Tensor:
    """The gradient of factor * (the network's loss on the batch) at `vector`; a view, valid until the next call."""
    if net.keeps_statistics:
        raise FedbenchError("this method does not train the network in place.", "Use norm bn_nostats or gn.")
    net.load(vector)
    backward(net, x, y)
    return net.grad if factor == 1 else net.grad.mul_(factor)


def fine_tune(
    start: Tensor,
    data: ClientData,
    ctx: Ctx,
    epochs: int | None = None,
    *,
    steps: int | None = None,
    extra_grad: ExtraGrad | None = None,
    repeats: int = 1,
) -> Tensor:
    """The whole network trained on from `start`: body and head, also where the head was frozen.

    For some epochs, or some batches (`steps`); `repeats` optimiser steps on each batch. `extra_grad` is called with
    vectors of the whole network. With `adapt_part: head` only the head moves. The rate is `adapt_lr`, or `lr` without
    decay.
    """
    net = ctx.task.net
    whole = net.extended(start)
    net.load(whole)
    net.use_generator(ctx.rng("adapt_dropout"))
    part = net.head if ctx.protocol.adapt_part == "head" else slice(0, whole.numel())
    optimizer = make_optimizer(net.part_of_whole(part), ctx, adapt_rate(ctx))
    grad = net.whole.grad
    assert grad is not None
    for x, y in data.batches(ctx.protocol.batch_size, ctx.rng("adapt"), epochs=epochs, steps=steps):
        for _ in range(repeats):
            backward(net, x, y)
            if extra_grad is not None:
                extra_grad(net.whole, grad)
            optimizer.step()
    adapted = whole.clone()
    adapted[part] = net.whole.detach()[part]  # all the rest is as it was, running statistics too
    return adapted


def adapt_rate(ctx: Ctx) -> float:
    """The rate of an adaptation: `adapt_lr`, or `lr` without decay."""
    return ctx.protocol.lr if ctx.protocol.adapt_lr is None else ctx.protocol.adapt_lr


def local_sgd(
    start: Tensor,
    data: ClientData,
    ctx: Ctx,
    memory: State | None = None,
    extra_grad: ExtraGrad | None = None,
    prefix: str = "optimizer.",
) -> tuple[Tensor, State]:
    """One round of local training from `start`: the new vector, and the optimiser state to keep under `prefix`."""
    net = ctx.task.net
    net.load(start)
    optimizer = make_optimizer(net.vector, ctx)
    restore_optimizer(optimizer, memory or {}, prefix)
    for x, y in local_batches(data, ctx):
        backward(net, x, y)
        if extra_grad is not None:
            extra_grad(net.vector, net.grad)
        optimizer.step()
    return net.vector.detach().clone(), optimizer_state(optimizer, ctx, prefix)


def weight_of(upload: Upload, ctx: Ctx) -> float:
    """The weight of a client in the server's average, not normalised."""
    return float(upload.n) if ctx.protocol.weighting == "samples" else 1.0


def average(server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
    """Weighted mean of the uploads, taken as they come, then extrapolated by beta from the server's state.

    Without uploads the server keeps its state.

    A running mean, because it is exact when clients agree: the average of equal models is that model, bit for bit.
    """
    mean: State = {}
    total = 0.0
    for upload in uploads:
        weight = weight_of(upload, ctx)
        total += weight
        for key, value in upload.message.items():
            if key in mean:
                mean[key].lerp_(value, weight / total)
            else:
                mean[key] = value.clone()
    return extrapolate(server, mean, ctx) if mean else server


def extrapolate(server: State, mean: State, ctx: Ctx) -> State:
    """w <- (1-beta) w + beta * average; the average itself for beta = 1."""
    if ctx.protocol.beta == 1.0:
        return mean
    return {key: torch.lerp(server[key], value, ctx.protocol.beta) for key, value in mean.items()}

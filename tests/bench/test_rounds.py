"""Training rounds as a ratio to a minimal loop that does the same arithmetic, both timed in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus

from fedbench.algorithm import Ctx, methods
from fedbench.job import build_job
from fedbench.memory import ClientStore
from fedbench.simulation import CPU, Progress, train_round
from fedbench.task import Task

STEPS, CLIENTS = 20, 10


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engine_round(method: str) -> Callable[[], None]:
    """One round of a method on digits, 10 clients x 20 batches, through the whole engine."""
    job = build_job({"method": method, "dataset": "digits", "size": "large", "local_unit": "batch", "tau": STEPS})
    task = Task(job, device=CPU)
    algorithm = methods.get(method)(methods.get(method).Params.model_validate(job.params))
    ctx = Ctx(task, job.protocol, seed=0)
    progress = Progress(
        0, algorithm.init_server(ctx), ClientStore(lambda client: algorithm.init_client(ctx.at(client)))
    )
    return partial(train_round, algorithm, progress, Ctx(task, job.protocol, 0, 1))


def batches(batch_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = torch.randn(STEPS, batch_size, 64), torch.randint(0, 10, (STEPS, batch_size))
    return list(zip(*data, strict=True))


def plain_net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def minimal_fedavg(data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    net = plain_net()
    for _ in range(CLIENTS):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
        for x, y in data:
            optimizer.zero_grad(set_to_none=False)
            cross_entropy(net(x), y).backward()
            optimizer.step()


def minimal_pfedbayes(data: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Personal and global-copy step on flat vectors, gradients written out, Adam fused."""
    net = plain_net()
    d = sum(p.numel() for p in net.parameters())
    flat, grad = torch.zeros(d), torch.zeros(d)
    offset = 0
    for p in net.parameters():
        p.data, p.grad = (buffer[offset : offset + p.numel()].view_as(p) for buffer in (flat, grad))
        offset += p.numel()
    for _ in range(CLIENTS):
        own, shared = (nn.Parameter(torch.randn(2, d) * 0.1 - 2.5, requires_grad=False) for _ in range(2))
        own_adam, shared_adam = (torch.optim.Adam([v], lr=0.001, fused=True) for v in (own, shared))
        for x, y in data:
            s, s_w = softplus(own[1]), softplus(shared[1])
            eps = torch.randn(d)
            flat.copy_(own[0] + s * eps)
            grad.zero_()
            cross_entropy(net(x), y).backward()
            gap = own[0] - shared[0]
            d_rho = (grad * eps + 0.01 * (s / s_w**2 - 1 / s)) * torch.sigmoid(own[1])
            own.grad = torch.stack([grad + 0.01 * gap / s_w**2, d_rho])
            own_adam.step()
            s, gap = softplus(own[1]), own[0] - shared[0]
            d_rho = (1 / s_w - (s**2 + gap**2) / s_w**3) * torch.sigmoid(shared[1])
            shared.grad = torch.stack([-gap / s_w**2, d_rho])
            shared_adam.step()


@pytest.mark.parametrize(
    ("method", "batch_size", "floor"), [("fedavg", 50, minimal_fedavg), ("pfedbayes", 100, minimal_pfedbayes)]
)
def test_a_round_costs_little_more_than_a_minimal_loop(benchmark, method, batch_size, floor):
    run, minimal = engine_round(method), partial(floor, batches(batch_size))
    for warm_up in (run, minimal):
        warm_up()

    benchmark.pedantic(run, rounds=10)

    floors = []
    for _ in range(10):
        started = time.perf_counter()
        minimal()
        floors.append(time.perf_counter() - started)
    ratio = benchmark.stats.stats.min / min(floors)
    benchmark.extra_info["ratio to the floor"] = round(ratio, 3)
    print(f"\n{method}: {ratio:.2f} x the minimal loop")
    assert ratio < 1.6

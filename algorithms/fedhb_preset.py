"""Preset: FedHB's first ensemble baseline: clients are dealt once into K random groups; each trains its own network."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from fedbench.algorithm import Ctx, Params, State
from fedbench.clustered import AssignedByServer
from fedbench.errors import FedbenchError
from fedbench.rng import numpy_rng

from .fedbabu import FedBABU


class FedHBPresetParams(Params):
    K: int = Field(2, ge=1, description="number of groups, and of networks")


class FedHBPreset(AssignedByServer, FedBABU):
    """FedBABU in every group: bodies are trained, the frozen head is common to all. With one group this is FedBABU.

    Cohorts are drawn from all clients; a group without participants keeps its network.
    """

    title = "Preset"
    Params = FedHBPresetParams
    defaults: ClassVar = FedBABU.defaults

    def init_server(self, ctx: Ctx) -> State:
        """Independent draws, of which the first is the common initial network, and the groups.

        Raises FedbenchError when there are more groups than clients.
        """
        k, draws = self.params.K, ctx.rng("clusters", on_cpu=True)
        if k > len(ctx.task.members):
            raise FedbenchError(f"{len(ctx.task.members)} clients do not make {k} groups.", "Use a smaller K.")
        others = (ctx.task.another_start(draws) for _ in range(k - 1))
        return {"w": torch.stack([ctx.task.initial, *others]), "assigned": groups(k, ctx).to(ctx.task.device)}


def groups(k: int, ctx: Ctx) -> torch.Tensor:
    """The group of every client: members dealt in random order, so that sizes differ by at most one; then newcomers."""
    order, assigned = numpy_rng(ctx.seed, "groups"), torch.zeros(ctx.task.clients, dtype=torch.int32)
    dealt = [*order.permutation(ctx.task.members), *order.permutation(ctx.task.newcomers)]
    for place, client in enumerate(dealt):
        assigned[int(client)] = place % k
    return assigned

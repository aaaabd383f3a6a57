"""LG-FedAvg: the last layers are averaged, every client keeps its own early layers; all are trained together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import Field, model_validator

from fedbench.algorithm import Ctx, Message, Params, State, Upload
from fedbench.errors import FedbenchError
from fedbench.models.network import Network
from fedbench.partly_shared import PartlyShared, Parts, SplitNetwork
from fedbench.task import ClientData
from fedbench.training import local_batches


class LGFedAvgParams(Params):
    shared_layers: int | None = Field(
        None, ge=1, description="linear layers that are averaged, from the last; default: all but the first, at least 1"
    )
    mode: Literal["paper", "code"] = Field(
        "paper",
        description="code: as in BPFed's repository, where nothing is ever downloaded: local training, and newcomers "
        "train the last layer only",
    )
    warmup_rounds: int = Field(0, ge=0, description="rounds of FedAvg on the whole network before the split")

    @model_validator(mode="after")
    def _nothing_to_warm_up(self) -> LGFedAvgParams:
        if self.mode == "code" and self.warmup_rounds:
            raise ValueError("warmup_rounds needs mode paper: with mode code nothing is downloaded")
        return self


class LGFedAvg(PartlyShared):
    """A client's first download after a warm-up is the whole network: its own part starts from there."""

    title = "LG-FedAvg"
    Params = LGFedAvgParams

    def shared(self, net: Network) -> slice:
        if self.params.mode == "code":
            return slice(net.d, net.d)
        chosen, linear = self.params.shared_layers, len(net.linear_starts)
        layers = chosen or max(1, linear - 1)
        if layers > linear:
            raise FedbenchError(f"shared_layers is {layers}, but the network has {linear} linear layers.")
        start = net.linear_starts[-layers]
        if start >= net.d or (start == 0 and chosen is None):
            raise FedbenchError(
                "LG-FedAvg needs early layers to keep and a last one to share.",
                "Use a deeper network, with train_part all.",
            )
        return slice(start, net.d)

    def parts(self, ctx: Ctx) -> Parts:
        return super().parts(ctx) | {"head": ctx.task.net.head}

    def train(self, net: SplitNetwork, data: ClientData, ctx: Ctx) -> None:
        net.train(local_batches(data, ctx), "head" if ctx.novel and self.params.mode == "code" else "all")

    # --- the warm-up: everything travels, clients keep nothing; then the server keeps its result for late-comers ---

    def init_server(self, ctx: Ctx) -> State:
        state = super().init_server(ctx)
        if self.params.warmup_rounds:
            has_own = torch.zeros(ctx.task.clients, dtype=torch.bool, device=ctx.task.device)
            state |= super().init_client(ctx) | {"has_own": has_own}
        return state

    def init_client(self, ctx: Ctx) -> State:
        return {} if self.params.warmup_rounds else super().init_client(ctx)

    def download(self, server: State, ctx: Ctx) -> Message:
        travels = {"shared": server["shared"]}
        if "own" in server and not server["has_own"][ctx.client]:
            travels["own"] = server["own"]
        return travels

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        message, kept = super().update(down, memory, data, ctx)
        if ctx.round <= self.params.warmup_rounds:
            message["own"] = kept.pop("own")
        return message, kept

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        merged = {**server, **super().aggregate(server, uploads, ctx)}
        if "own" in server and ctx.round > self.params.warmup_rounds:
            merged["has_own"] = server["has_own"].clone()
            merged["has_own"][list(self.select(server, {}, ctx).train)] = True
        return merged

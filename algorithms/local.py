"""Local: every client trains alone; nothing is sent. The control of every personalised method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import Field

from fedbench.algorithm import Algorithm, Cohort, Ctx, Message, Params, State, Upload
from fedbench.task import ClientData
from fedbench.training import fine_tune, local_sgd


class LocalParams(Params):
    budget: Literal["expected", "full", "one_round"] = Field(
        "expected",
        description="rounds of local work: round(f T), a client's expected share under federation; all T; or one",
    )


class Local(Algorithm):
    title = "Local"
    regression = True
    Params = LocalParams

    def init_server(self, ctx: Ctx) -> State:
        return {}

    def init_client(self, ctx: Ctx) -> State:
        return {"w": ctx.task.initial}

    def select(self, server: State, polls: Mapping[int, Message], ctx: Ctx) -> Cohort:
        """All clients, in the first rounds of the run, until the budget is spent."""
        rounds = {"expected": max(1, round(ctx.protocol.f * ctx.rounds)), "full": ctx.rounds, "one_round": 1}
        return Cohort(train=ctx.task.members if ctx.round <= rounds[self.params.budget] else (), report=())

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        w, kept = local_sgd(memory["w"], data, ctx, memory)
        return {}, {"w": w, **kept}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        return server

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        return None

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The client's model; adapted: trained on."""
        return memory if epochs is None else {"w": fine_tune(memory["w"], data, ctx, epochs)}

"""Scores a state: which rounds are evaluated, and how every client's model meets its test data."""

from __future__ import annotations

from itertools import groupby

import torch

from fedbench.algorithm import Algorithm, Ctx, PredictMode, State
from fedbench.job import Protocol
from fedbench.memory import ClientStore
from fedbench.metrics import Tally
from fedbench.records import Evaluation, HistogramRow, Stage, View

SHARED_BATCH = 2048
"""Images per forward pass where the batch does not matter."""
STATISTICS_BATCH = 128
"""Images per forward pass where normalisation uses the batch's statistics, so that its size is part of the result."""

WINDOWS = {"final": 1, "best_last100": 100, "mean_last10": 10}
"""Rule -> how many of the last rounds it looks at; best_all looks at all."""


def is_evaluated(round_: int, protocol: Protocol) -> bool:
    """Whether the schedule or the rule's window asks for this round."""
    return round_ % protocol.eval_every == 0 or in_window(round_, protocol)


def in_window(round_: int, protocol: Protocol) -> bool:
    """Whether the selection rule looks at this round."""
    return round_ > protocol.rounds - WINDOWS.get(protocol.rule, protocol.rounds)


def evaluate(
    algorithm: Algorithm,
    server: State,
    memories: ClientStore,
    ctx: Ctx,
    view: View,
    mode: PredictMode,
    *,
    stage: Stage = "train",
    per_client: bool = False,
) -> Evaluation | None:
    """All clients' test splits under one view; None if the method has no such model."""
    everyone = tuple(range(ctx.task.clients))
    models = {client: _model(algorithm, server, memories, ctx.at(client), view) for client in everyone}
    if all(model is None for model in models.values()):
        return None
    tally = Tally.zeros(len(everyone))
    alone = ctx.task.net.uses_batch_statistics
    for _, group in groupby(everyone, key=lambda client: (id(models[client]), client if alone else None)):
        members = tuple(group)
        if (model := models[members[0]]) is not None:
            _score(algorithm, model, members, ctx, mode, tally)
    metrics: dict[int | None, dict[str, float]] = {None: tally.pooled().rows()[0]}
    reliability: dict[int | None, list[HistogramRow]] = {None: _histogram(tally.pooled(), 0)}
    rows = tally.rows()
    scored = [row["accuracy"] for row in rows if row]
    metrics[None]["macro"] = sum(scored) / len(scored)
    if per_client:
        metrics |= {client: rows[client] for client in everyone if rows[client]}
        reliability |= {client: _histogram(tally, client) for client in everyone if rows[client]}
    return Evaluation(ctx.round, stage, view, mode, metrics, reliability)


def _model(algorithm: Algorithm, server: State, memories: ClientStore, ctx: Ctx, view: View) -> State | None:
    assert ctx.client is not None
    data = ctx.task.train_data(ctx.client)
    if view == "gm":
        return algorithm.global_model(server, memories[ctx.client], data, ctx)
    return algorithm.personal_model(server, memories[ctx.client], data, ctx, 0)


def _score(
    algorithm: Algorithm, model: State, clients: tuple[int, ...], ctx: Ctx, mode: PredictMode, tally: Tally
) -> None:
    """Add the test samples of clients that share a model to the tally."""
    task = ctx.task
    # a shared model predicts the same whoever asks; a client's own draws the client's own noise
    where = ctx.at(clients[0]) if len(clients) == 1 else ctx
    size = STATISTICS_BATCH if task.net.uses_batch_statistics else SHARED_BATCH
    owner = torch.repeat_interleave(torch.tensor(clients), torch.tensor(task.test_sizes(clients))).to(task.device)
    with torch.no_grad():
        for (x, y), of_client in zip(task.test_data(*clients).chunks(size), owner.split(size), strict=True):
            tally.add(algorithm.predict(model, x, where, mode), y, of_client)


def _histogram(tally: Tally, row: int) -> list[HistogramRow]:
    cells = enumerate(tally.bins[row])
    return [(index, float(n), float(confidence), float(correct)) for index, (n, confidence, correct) in cells if n > 0]

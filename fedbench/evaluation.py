"""Scores a state: how every client's model meets its test data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from fedbench.algorithm import Algorithm, Ctx, PredictMode, State
from fedbench.memory import ClientStore
from fedbench.metrics import Errors, Tally, copy_row, predictive_entropy
from fedbench.records import Evaluation, HistogramRow, Stage, View
from fedbench.task import ClientData

SHARED_BATCH = 2048
"""Images per forward pass where the batch does not matter."""
STATISTICS_BATCH = 128
"""Images per forward pass where normalisation uses the batch's statistics, so that its size is part of the result."""

VIEWS: tuple[View, ...] = ("gm", "pm")

ModelOf = Callable[[int], State | None]
"""A client's model; None if the method has none. Asked for one client at a time, so that few are in memory."""


@dataclass(frozen=True)
class Standing:
    """A method's state at one moment: what can be scored."""

    algorithm: Algorithm
    server: State
    memories: ClientStore
    ctx: Ctx

    @property
    def modes(self) -> tuple[PredictMode, ...]:
        """The ways to predict: MC only where it differs from the mean."""
        return ("mean", "mc") if self.algorithm.predicts_by_sampling() else ("mean",)

    def model_of(self, view: View, epochs: int | None = None) -> ModelOf:
        """The models of a view; `epochs` asks for personal models adapted by so many passes over the client's data."""

        def model(client: int) -> State | None:
            here, memory = self.ctx.at(client), self.memories[client]
            data = self.ctx.task.train_data(client)
            if view == "gm":
                return self.algorithm.global_model(self.server, memory, data, here)
            return self.algorithm.personal_model(self.server, memory, data, here, epochs)

        return model

    def evaluate(
        self,
        view: View,
        mode: PredictMode,
        *,
        stage: Stage = "train",
        step: int = 0,
        clients: tuple[int, ...] | None = None,
        model_of: ModelOf | None = None,
        per_client: bool = False,
    ) -> Evaluation | None:
        """Clients' own test splits under one view; None if the method has no such model.

        By default all clients that train, with the models of the view.
        """
        task = self.ctx.task
        everyone = task.members if clients is None else clients
        tally = (Errors if task.net.regression else Tally).zeros(task.clients)
        described = dict[int, dict[str, float]]()
        for members, model in _sharing(everyone, model_of or self.model_of(view), alone=task.net.uses_batch_statistics):
            self._score(model, members, mode, tally)
            described |= dict.fromkeys(members, self.algorithm.describe(model, self.ctx))
        found = _evaluation(self.ctx, stage, view, mode, tally, step=step, per_client=per_client)
        return None if found is None else _with_descriptions(found, described)

    def evaluate_clean(self, mode: PredictMode, stage: Stage) -> Evaluation | None:
        """The global model on the task's clean data set, as one client."""
        data, task = self.ctx.task.clean_data(), self.ctx.task
        model = self.model_of("gm")(task.members[0])
        if data is None or model is None:
            return None
        tally = Tally.zeros(1)
        with torch.no_grad():
            for x, y in data.chunks(_batch_size(self.ctx)):
                probabilities = self.algorithm.predict(model, x, self.ctx, mode)
                tally.add(probabilities, y, torch.zeros_like(y))
        return _evaluation(self.ctx, stage, "gm", mode, tally, split="clean")

    def evaluate_ood(self, view: View, mode: PredictMode, stage: Stage) -> Evaluation | None:
        """Entropies on images from elsewhere, and how well they tell these from the client's own (AUROC).

        Client by client, with the foreign images whose label number the client knows.
        """
        task = self.ctx.task
        known: list[np.ndarray] = []
        foreign: list[np.ndarray] = []
        tally, areas = Tally.zeros(task.clients), {}
        for client in task.members:
            data, model = task.ood_data(client), self.model_of(view)(client)
            if data is None or model is None or data.n == 0 or not task.test_sizes((client,))[0]:
                continue
            known.append(self._entropies(model, client, task.test_data(client), mode))
            foreign.append(self._entropies(model, client, data, mode, tally))
            areas[client] = _auroc(known[-1], foreign[-1])
        if not areas:
            return None
        found = _evaluation(self.ctx, stage, view, mode, tally, split="ood", per_client=True)
        assert found is not None
        pooled = {"entropy": found.metrics[None]["entropy"]} | {
            "auroc": _auroc(np.concatenate(known), np.concatenate(foreign))
        }
        each = {client: {"entropy": found.metrics[client]["entropy"], "auroc": area} for client, area in areas.items()}
        return Evaluation(
            found.round, stage, view, mode, metrics={None: pooled, **each}, entropy=found.entropy, split="ood"
        )

    def _score(self, model: State, clients: tuple[int, ...], mode: PredictMode, tally: Tally | Errors) -> None:
        """Add the test samples of clients that share a model to the tally."""
        task = self.ctx.task
        # a shared model predicts the same whoever asks; a client's own draws the client's own noise
        where = self.ctx.at(clients[0]) if len(clients) == 1 else self.ctx
        size = _batch_size(self.ctx)
        # partitions may give all clients one test set, which a shared model need not see more than once
        first = {id(task.split.test[client]): client for client in reversed(clients)}
        scored = tuple(client for client in clients if first[id(task.split.test[client])] == client)
        owner = torch.repeat_interleave(torch.tensor(scored), torch.tensor(task.test_sizes(scored))).to(task.device)
        with torch.no_grad():
            for (x, y), of_client in zip(task.test_data(*scored).chunks(size), owner.split(size), strict=True):
                tally.add(self.algorithm.predict(model, x, where, mode), y, of_client)
        for client in clients:
            copy_row(tally, first[id(task.split.test[client])], client)

    def _entropies(
        self, model: State, client: int, data: ClientData, mode: PredictMode, tally: Tally | None = None
    ) -> np.ndarray:
        parts = []
        with torch.no_grad():
            for x, y in data.chunks(_batch_size(self.ctx)):
                probabilities = self.algorithm.predict(model, x, self.ctx.at(client), mode)
                parts.append(predictive_entropy(probabilities).cpu().numpy())
                if tally is not None:
                    tally.add(probabilities, y, torch.full_like(y, client))
        return np.concatenate(parts)


def _sharing(clients: Iterable[int], model_of: ModelOf, *, alone: bool) -> Iterator[tuple[tuple[int, ...], State]]:
    """Neighbouring clients with the same model, together; `alone`: each by itself, because batches must not mix."""
    members: list[int] = []
    current: State | None = None
    for client in clients:
        model = model_of(client)
        if members and (alone or model is not current):
            if current is not None:
                yield tuple(members), current
            members = []
        current = model
        members.append(client)
    if members and current is not None:
        yield tuple(members), current


def _batch_size(ctx: Ctx) -> int:
    return STATISTICS_BATCH if ctx.task.net.uses_batch_statistics else SHARED_BATCH


def _evaluation(
    ctx: Ctx,
    stage: Stage,
    view: View,
    mode: PredictMode,
    tally: Tally | Errors,
    *,
    step: int = 0,
    split: str = "test",
    per_client: bool = False,
) -> Evaluation | None:
    rows = tally.rows()
    scored = [client for client, row in enumerate(rows) if row]
    if not scored:
        return None
    metrics: dict[int | None, dict[str, float]] = {None: tally.pooled().rows()[0]}
    if per_client:
        metrics |= {client: rows[client] for client in scored}
    if isinstance(tally, Errors):
        return Evaluation(ctx.round, stage, view, mode, metrics, step=step, split=split)
    pooled = tally.pooled()
    metrics[None]["macro"] = float(np.mean([rows[client]["accuracy"] for client in scored]))
    reliability: dict[int | None, list[HistogramRow]] = {None: _reliability(pooled, 0)}
    entropy: dict[int | None, list[HistogramRow]] = {}
    if per_client:
        reliability |= {client: _reliability(tally, client) for client in scored}
        if ctx.task.has_ood:
            entropy = {None: _entropy(pooled, 0), **{client: _entropy(tally, client) for client in scored}}
    return Evaluation(ctx.round, stage, view, mode, metrics, reliability, entropy, step, split)


def _with_descriptions(evaluation: Evaluation, described: dict[int, dict[str, float]]) -> Evaluation:
    """The evaluation with what the method says of its models: per client where it has clients, and their mean."""
    scored = [described[client] for client in described if described[client]]
    for name in scored[0] if scored else ():
        evaluation.metrics[None][name] = float(np.mean([figures[name] for figures in scored]))
    for client, figures in described.items():
        if client in evaluation.metrics:
            evaluation.metrics[client].update(figures)
    return evaluation


def _reliability(tally: Tally, row: int) -> list[HistogramRow]:
    cells = enumerate(tally.bins[row])
    return [(index, float(n), float(confidence), float(correct)) for index, (n, confidence, correct) in cells if n > 0]


def _entropy(tally: Tally, row: int) -> list[HistogramRow]:
    return [(index, float(n), 0.0, 0.0) for index, n in enumerate(tally.entropies[row]) if n > 0]


def _auroc(known: np.ndarray, foreign: np.ndarray) -> float:
    """Probability that a foreign image has the higher entropy; ties count half."""
    from sklearn.metrics import roc_auc_score

    truth = np.concatenate([np.zeros(len(known)), np.ones(len(foreign))])
    return float(roc_auc_score(truth, np.concatenate([known, foreign])))

"""Ensemble: FedHB's second ensemble baseline: K networks, each trained by a group of clients, vote on every image."""

from __future__ import annotations

import torch
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, PredictMode, State
from fedbench.task import ClientData
from fedbench.training import fine_tune

from .fedhb_preset import FedHBPreset


class FedHBEnsemble(FedHBPreset):
    """Trained as Preset; predicts the mean of all K softmax outputs. A client adapts all K networks.

    For that it would download K networks once, which is not part of the training's traffic.
    """

    title = "Ensemble"

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        """All networks, for everybody."""
        return server

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """All networks, each fine-tuned on the client's data."""
        if epochs is None:
            return None
        return {"w": torch.stack([fine_tune(w, data, ctx, epochs) for w in server["w"]])}

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """Nothing: no client belongs to one network."""
        return {}

    def predicts_by_sampling(self) -> bool:
        return False

    def predict(self, model: State, x: Tensor, ctx: Ctx, mode: PredictMode) -> Tensor:
        """The mean of the networks' probabilities, whatever the mode."""
        votes = [Algorithm.predict(self, {"w": w}, x, ctx, mode) for w in model["w"]]
        return torch.stack(votes).mean(0)

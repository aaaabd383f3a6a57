"""FedBABU: FedAvg on the body; the head is drawn once and never trained. Clients then fine-tune body and head."""

from __future__ import annotations

from typing import ClassVar

from .fedavg import FedAvg


class FedBABU(FedAvg):
    """The frozen head is the task's business (`train_part: body`); with `train_part: all` this is FedAvg."""

    title = "FedBABU"
    defaults: ClassVar = {"train_part": "body", "weighting": "uniform"}

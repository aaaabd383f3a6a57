"""FedPer: the body is averaged, every client keeps its own head; both are trained together."""

from __future__ import annotations

from fedbench.partly_shared import PartlyShared


class FedPer(PartlyShared):
    """With a head of width zero (`train_part: body`) this is FedAvg."""

    title = "FedPer"

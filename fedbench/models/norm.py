"""The choice of normalisation layers, for every network that has some."""

from __future__ import annotations

from typing import Literal

from torch import nn

Norm = Literal["bn_nostats", "bn_stats", "gn"]


def norm_layer(norm: Norm, channels: int) -> nn.Module:
    """bn_nostats: the batch's own statistics, always; bn_stats: running ones in evaluation; gn: two groups."""
    if norm == "gn":
        return nn.GroupNorm(2, channels)
    return nn.BatchNorm2d(channels, momentum=0.1, track_running_stats=norm == "bn_stats")

"""Dropout whose masks come from a given generator, because nothing here draws from the global one."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Dropout(nn.Module):
    """In training each value is 0 with probability `p`, else divided by 1 - p; in evaluation nothing happens."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.generator is None:
            raise RuntimeError("dropout in training needs a generator: call use_generator of the network first")
        kept = torch.empty_like(x).bernoulli_(1 - self.p, generator=self.generator)
        return x * kept.div_(1 - self.p)

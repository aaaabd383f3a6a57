"""Addressed randomness: a generator is a function of (seed, purpose, round, client), never of what ran before."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derived_seed(seed: int, purpose: str, round_: int = 0, client: int | None = None) -> int:
    """63 bits from the address."""
    address = f"{seed}|{purpose}|{round_}|{'' if client is None else client}".encode()
    return int.from_bytes(hashlib.blake2b(address, digest_size=8).digest(), "big") >> 1


def torch_rng(seed: int, purpose: str, round_: int, client: int | None, device: torch.device) -> torch.Generator:
    import torch  # here: partitions draw too, and run where nothing trains

    return torch.Generator(device=device).manual_seed(derived_seed(seed, purpose, round_, client))


def numpy_rng(seed: int, purpose: str, round_: int = 0, client: int | None = None) -> np.random.Generator:
    return np.random.default_rng(derived_seed(seed, purpose, round_, client))

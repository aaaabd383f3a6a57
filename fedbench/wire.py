"""Messages as they travel between server and clients, and what that costs."""

from __future__ import annotations

import torch

from fedbench.algorithm import Message


def on_wire(message: Message) -> Message:
    """As it travels: floats as float32, integers as int32."""
    return {
        key: value.to(torch.float32 if value.is_floating_point() else torch.int32) for key, value in message.items()
    }


def size_of(message: Message) -> int:
    """Bytes on the wire."""
    return sum(value.numel() * value.element_size() for value in message.values())

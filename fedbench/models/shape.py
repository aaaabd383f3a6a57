"""Shapes of images: what a builder is given, and the refusal of sizes that a network's linear layers cannot take."""

from __future__ import annotations

from fedbench.errors import FedbenchError

Shape = tuple[int, int, int]
"""Channels, height, width."""


def require_side(name: str, shape: Shape, side: int) -> None:
    """Raises FedbenchError when the images are not side x side."""
    if shape[1:] != (side, side):
        raise FedbenchError(f"{name} is for {side}x{side} images, not {shape[1]}x{shape[2]}.", "Use dnn100 or mlp256.")

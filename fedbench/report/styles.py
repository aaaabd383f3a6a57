"""How every method is drawn: the same colour, line and marker in all figures, to be told apart in grey too.

Colours are Okabe and Ito's, which the colour-blind see apart, without yellow, which is lost on white paper. Methods
take colour, line and marker in the order of METHODS from cycles of different lengths, so that no two of the first 35
share colour and line. A method that is not listed gets the style that a hash of its name picks: the same everywhere.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

LineStyle = Literal["-", "--", "-.", ":"] | tuple[float, tuple[float, ...]]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
LINES: tuple[LineStyle, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")

METHODS = (
    *("fedavg", "fedprox", "pfedbayes", "local", "pfedme", "perfedavg", "ditto"),
    *("sfedbayes", "cfedbayes", "bpfed", "fedabml", "fedpa", "bnfed", "pfedgp"),
    *("heurfedamp", "fedrep", "fedper", "lgfedavg", "fedbabu", "fedpop", "scaffold"),
    *("fedhb_niw", "fedhb_mixture", "fedbe", "fedem", "ifca", "fesem", "fedcfl"),
)
"""Append only: moving a name changes the look of published figures."""


@dataclass(frozen=True)
class Style:
    """Colour, line and marker of one line; `place` keeps the markers of lines that coincide apart."""

    colour: str
    line: LineStyle
    marker: str
    place: int


def style_of(method: str, variant: int = 0) -> Style:
    """The method's style; variants (`fedprox[mu=0.1]`) share its colour and differ in line and marker."""
    return style_at(METHODS.index(method) if method in METHODS else _hashed(method), variant)


def style_at(place: int, variant: int = 0) -> Style:
    """The style at a place in the cycles: what the lines that a paper names have by their order."""
    return Style(
        COLOURS[place % len(COLOURS)],
        LINES[(place + place // len(COLOURS) + variant) % len(LINES)],
        MARKERS[(place + variant) % len(MARKERS)],
        place + variant,
    )


def _hashed(method: str) -> int:
    # not hash(): it differs from process to process
    digest = int.from_bytes(hashlib.sha256(method.encode()).digest()[:4])
    return digest % (len(COLOURS) * len(LINES))

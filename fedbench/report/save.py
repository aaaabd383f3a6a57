"""Writes a figure as PNG and SVG."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedbench.errors import FedbenchError

FORMATS = ("png", "svg")


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The files written, one per format. Raises FedbenchError when the folder cannot be written.

    The same figure gives the same bytes: no date, and ids that do not depend on chance.
    """
    paths = [folder / f"{name}.{suffix}" for suffix in FORMATS]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            with matplotlib.rc_context({"svg.hashsalt": name}):
                figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise FedbenchError(
            f"{folder} cannot be written: {error.strerror}.", "Choose another folder with --out."
        ) from None
    return paths

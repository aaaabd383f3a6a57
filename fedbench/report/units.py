"""How a stored figure is printed: accuracies and calibration errors in percent, scores as they are."""

from __future__ import annotations

PERCENT = frozenset({"accuracy", "macro", "ece", "mce"})
"""Metrics that are printed in percent; the database holds fractions."""
BYTES_PER_MB = 1_000_000


def scale(metric: str) -> float:
    """The factor from the stored value to the printed one."""
    return 100.0 if metric in PERCENT else 1.0


def axis_label(metric: str) -> str:
    """The metric's name with its unit, as an axis says it."""
    names = {
        "macro": "accuracy, mean over clients",
        "ece": "ECE",
        "mce": "MCE",
        "nll": "NLL",
        "brier": "Brier score",
        "rmse": "RMSE",
    }
    return names.get(metric, metric) + (" (%)" if metric in PERCENT else "")

"""Selection rules: which rounds of a stored curve make the headline number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedbench.errors import FedbenchError, did_you_mean
from fedbench.schedule import in_window

WORDS = {
    "final": "of the final round",
    "best_all": "of the best round",
    "best_ckpt": "of the best round of those scored",
    "best_last100": "of the best of the last 100 rounds",
    "mean_last10": "as the mean of the last 10 rounds",
}
"""How a note says the rule: "accuracy of the final round"."""


@dataclass(frozen=True)
class Selected:
    """A headline number and the rounds that it comes from."""

    value: float
    rounds: tuple[int, ...]


def apply_rule(rule: str, curve: Mapping[int, float], rounds: int, *, smaller_wins: bool = False) -> Selected | None:
    """The number that the rule takes from a curve (round -> value) of a job of so many rounds.

    The best value is the largest, or with `smaller_wins` the smallest.

    None when the curve has no round that the rule looks at. Raises FedbenchError for an unknown rule.
    """
    if rule not in WORDS:
        raise FedbenchError(f"unknown selection rule {rule!r}.", did_you_mean(rule, WORDS))
    if rule == "final":
        return Selected(curve[rounds], (rounds,)) if rounds in curve else None
    seen = {round_: value for round_, value in sorted(curve.items()) if in_window(round_, rule, rounds)}
    if not seen:
        return None
    if rule == "mean_last10":
        return Selected(sum(seen.values()) / len(seen), tuple(seen))
    pick = min if smaller_wins else max
    best = pick(seen, key=lambda round_: seen[round_])  # the first of equals, as the simulation keeps its best state
    return Selected(seen[best], (best,))


def rule_words(rule: str, what: str = "accuracy") -> str:
    """The rule as the end of a sentence that begins with the metric."""
    return WORDS[rule] + (f" (chosen by test {what}: optimistic)" if looks_for_best(rule) else "")


def looks_for_best(rule: str) -> bool:
    """Whether the rule picks a round by its test accuracy, which is optimistic."""
    return rule.startswith("best")

"""Which rounds are evaluated, and which of them a selection rule looks at. Needs no torch."""

from __future__ import annotations

from fedbench.job import Protocol

LAST_ROUNDS = {"final": 1, "best_last100": 100, "mean_last10": 10}
"""Rule -> how many of the last rounds it looks at; the others look at all that were scored."""


def is_evaluated(round_: int, protocol: Protocol) -> bool:
    """Whether the schedule or the rule asks for this round. best_ckpt takes the schedule's, and the last."""
    if round_ % protocol.eval_every == 0 or round_ == protocol.rounds:
        return True
    return protocol.rule != "best_ckpt" and in_window(round_, protocol.rule, protocol.rounds)


def in_window(round_: int, rule: str, rounds: int) -> bool:
    """Whether the rule looks at this round of a run of so many rounds."""
    return round_ > rounds - LAST_ROUNDS.get(rule, rounds)

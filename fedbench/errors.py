"""Mistakes of the user or of the surroundings: one clear message with the way out, never a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


class FedbenchError(Exception):
    """A problem that the user can mend. The command line prints the message and exits with 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both as args, so that it survives pickling between processes
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n{self.hint}" if self.hint else self.message


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that proposes the nearest known words, or lists all of them when none is near."""
    known = sorted(known)
    near = difflib.get_close_matches(word.lower(), known, n=3, cutoff=0.6)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Known: {', '.join(known)}." if known else "None are known."


def explain(error: ValidationError) -> str:
    """The pydantic complaints as one line each: key, what is wrong, what was given."""
    lines = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"])
        given = f" (got {item['input']!r})" if item["type"] != "missing" and item["loc"] else ""
        message = item["msg"].removeprefix("Value error, ")
        lines.append(f"{place}: {message}{given}" if place else message)
    return "\n".join(lines)

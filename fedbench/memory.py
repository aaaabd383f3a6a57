"""What clients keep between rounds: created on first use, replaced as a whole, never changed in place."""

from __future__ import annotations

from collections.abc import Callable

from fedbench.algorithm import State


class ClientStore:
    """The memories of all clients."""

    def __init__(self, first: Callable[[int], State], known: dict[int, State] | None = None) -> None:
        self._first = first
        self._known = dict(known or {})

    def __getitem__(self, client: int) -> State:
        if client not in self._known:
            self._known[client] = self._first(client)
        return self._known[client]

    def __setitem__(self, client: int, memory: State) -> None:
        self._known[client] = memory

    def snapshot(self) -> dict[int, State]:
        """All memories as they are now. Costs references only, because states are never changed in place."""
        return dict(self._known)

    def restored(self, snapshot: dict[int, State]) -> ClientStore:
        """A store that holds an earlier snapshot."""
        return ClientStore(self._first, snapshot)

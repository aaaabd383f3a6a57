"""Probabilistic neural matching (PFNM): which hidden neurons of several clients are the same, and what these agree on.

A neuron is the vector of all its weights. Global neurons are drawn from N(mean, 1 / precision), a client's neurons
from N(their global neuron, 1 / the client's precision), and how many global neurons there are and who uses them is a
Beta-Bernoulli process of mass gamma. No two neurons of a client belong to the same global one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

Array = NDArray[np.float64]
Indices = NDArray[np.intp]


@dataclass(frozen=True)
class Prior:
    """What is known of the global neurons before any client is seen; mean and precision have an entry per weight."""

    mean: Array
    precision: Array
    gamma: float = 1.0
    count_weight: float = 1.0
    """Factor on the log odds that a neuron is used: 1 in the public code, 2 in the posterior."""
    count_cap: int = 10
    """A neuron that more clients use is no more attractive than one that so many use."""
    max_width: int = 700
    """Largest number of global neurons; no client may have more."""


@dataclass(frozen=True)
class LocalNeurons:
    """The neurons of one client, a row each, and how precisely they show the global ones: an entry per weight."""

    values: Array
    precision: Array


@dataclass(frozen=True)
class Matching:
    """The global neurons, a row each; how many clients use each; which of them every client's neurons belong to."""

    neurons: Array
    counts: Indices
    assignments: list[Indices]


def match(
    clients: Sequence[LocalNeurons],
    prior: Prior,
    sweeps: int,
    rng: np.random.Generator,
    start: Sequence[Indices] | None = None,
) -> Matching:
    """Match one client after the other, the largest first; then, `sweeps` times, take out each and match it again.

    With a `start`, the assignments of an earlier matching, the sweeps begin from there. Its numbers are only names:
    neurons that none of these clients use are not there.
    """
    pool = Pool(prior, len(clients))
    if start is None:
        assignments = [np.empty(0, dtype=np.intp)] * len(clients)
        for j in sorted(range(len(clients)), key=lambda j: -len(clients[j].values)):
            assignments[j] = pool.place(clients[j])
    else:
        known, numbers = np.unique(np.concatenate(start), return_inverse=True)
        assignments = np.split(numbers, np.cumsum([len(used) for used in start])[:-1])
        pool.open(len(known))
        for client, used in zip(clients, assignments, strict=True):
            pool.add(client, used)
    for _ in range(sweeps):
        for j in rng.permutation(len(clients)):
            pool.remove(clients[j], assignments[j])
            renumber = pool.drop_unused()
            assignments = [renumber[used] for used in assignments]
            assignments[j] = pool.place(clients[j])
    return Matching(pool.weighted / pool.precision, pool.counts, assignments)


def gains(weighted: Array, precision: Array, client: LocalNeurons) -> Array:
    """Row l, column i: by how much the fit improves when the client's neuron l belongs to global neuron i.

    sum over the weights of (A + s v)^2 / (P + s) - A^2 / P, with A = `weighted` and P = `precision` of the global
    neuron. The square is multiplied out: then all pairs are two matrix products.
    """
    s_v, inverse = client.precision * client.values, 1 / (precision + client.precision)
    alone = (weighted**2 * (inverse - 1 / precision)).sum(1)
    return s_v**2 @ inverse.T + 2 * s_v @ (weighted * inverse).T + alone  # type: ignore[no-any-return]


class Pool:
    """The global neurons so far: `weighted` A = s0 mu0 + sum s v, `precision` P = s0 + sum s, and their `counts` c."""

    def __init__(self, prior: Prior, n_clients: int) -> None:
        self._prior, self._n_clients = prior, n_clients
        self._empty = (prior.precision * prior.mean)[None], prior.precision[None]
        self.weighted, self.precision = (row[:0] for row in self._empty)
        self.counts = np.zeros(0, dtype=np.intp)

    def open(self, n: int) -> None:
        """Add `n` neurons that nobody uses yet."""
        weighted, precision = self._empty
        self.weighted = np.concatenate([self.weighted, weighted.repeat(n, 0)])
        self.precision = np.concatenate([self.precision, precision.repeat(n, 0)])
        self.counts = np.concatenate([self.counts, np.zeros(n, dtype=np.intp)])

    def place(self, client: LocalNeurons) -> Indices:
        """Match a client that is not in the pool, add it, and return its assignment."""
        columns: Indices = linear_sum_assignment(self.profits(client), maximize=True)[1]
        is_new = columns >= len(self.counts)
        # new neurons are opened in the order of the client's own, whichever columns stood for them
        columns[is_new] = len(self.counts) + np.arange(is_new.sum())
        self.open(int(is_new.sum()))
        self.add(client, columns)
        return columns

    def profits(self, client: LocalNeurons) -> Array:
        """Row l: what it brings to match neuron l to each of the pool's neurons, or to open a 1st, 2nd, ... new one."""
        prior, J, L = self._prior, self._n_clients, len(self.counts)
        c = np.minimum(self.counts, prior.count_cap)
        known = gains(self.weighted, self.precision, client) + prior.count_weight * np.log(c / (J - c))
        k = np.arange(1, min(len(client.values), prior.max_width - L) + 1)
        new = gains(*self._empty, client) - 2 * np.log(k) + 2 * np.log(prior.gamma / J)
        return np.hstack([known, new])

    def add(self, client: LocalNeurons, to: Indices) -> None:
        self.weighted[to] += client.precision * client.values
        self.precision[to] += client.precision
        self.counts[to] += 1

    def remove(self, client: LocalNeurons, at: Indices) -> None:
        self.weighted[at] -= client.precision * client.values
        self.precision[at] -= client.precision
        self.counts[at] -= 1

    def drop_unused(self) -> Indices:
        """Forget neurons that nobody uses; for every old number the new one."""
        used = self.counts > 0
        self.weighted, self.precision, self.counts = self.weighted[used], self.precision[used], self.counts[used]
        return np.cumsum(used) - 1

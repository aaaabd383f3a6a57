"""Neural matching by hand, against the log posterior that it climbs, and in the cases whose answer is known."""

from itertools import permutations
from math import log

import numpy as np
import pytest
from scipy.optimize import minimize

from fedbench.matching import LocalNeurons, Pool, Prior, gains, match


def prior(size, *, mean=0.0, precision=1.0, **settings):
    return Prior(np.full(size, mean), np.full(size, precision), **settings)


def local(values, precision=1.0):
    values = np.array(values, dtype=float)
    return LocalNeurons(values, np.broadcast_to(np.array(precision, dtype=float), values.shape[1:]).copy())


def rng(seed=0):
    return np.random.default_rng(seed)


def random_clients(n, width, size, *, seed, spread=1.0):
    draw = rng(seed)
    return [local(spread * draw.normal(size=(width, size)), draw.uniform(0.3, 2.0, size)) for _ in range(n)]


def as_lists(found):
    return [used.tolist() for used in found.assignments]


# --- two clients by hand ---


def test_two_clients_with_the_same_neurons_in_another_order():
    clients = [local([[2, 0], [0, 2]]), local([[0, 1], [3, 0]])]

    found = match(clients, prior(2), sweeps=0, rng=rng())

    # With s0 = s = 1 client 0 opens A = (2, 0), (0, 2) with P = 2. What client 1 brings, log(c / (J - c)) being log 1:
    #          to neuron 0                   to neuron 1                   to a new one
    # (0, 1)   (4 + 1)/3 - 4/2 = -1/3        3^2/3 - 4/2 = 1               1/2 + 2 log(1/2) = -0.886
    # (3, 0)   5^2/3 - 4/2 = 6 1/3           (9 + 4)/3 - 4/2 = 2 1/3       9/2 + 2 log(1/2) = 3.114
    assert as_lists(found) == [[0, 1], [1, 0]]
    # (2 + 3)/3 and (2 + 1)/3
    np.testing.assert_allclose(found.neurons, [[5 / 3, 0], [0, 1]])
    assert found.counts.tolist() == [2, 2]


def test_a_neuron_far_from_all_others_is_a_new_one():
    clients = [local([[2, 0], [0, 2]]), local([[0, 1], [-3, 0]])]

    found = match(clients, prior(2), sweeps=5, rng=rng())

    # (-3, 0) would bring 1/3 - 2 = -1 2/3 at neuron 0, 13/3 - 2 = 2 1/3 at neuron 1, and 3.114 as a new one
    neurons = {tuple(row) for row in found.neurons.round(9).tolist()}
    assert neurons == {(1.0, 0.0), (0.0, 1.0), (-1.5, 0.0)}  # 2/2, (2 + 1)/3, -3/2
    assert sorted(found.counts.tolist()) == [1, 1, 2]


@pytest.mark.parametrize(("gamma", "width"), [(0.67, 1), (0.68, 2)])
def test_a_new_neuron_costs_twice_the_log_of_gamma_over_the_clients(gamma, width):
    clients = [local([[2]]), local([[-1]])]

    found = match(clients, prior(1, gamma=gamma), sweeps=0, rng=rng())

    # together (2 - 1)^2/3 - 4/2 = -5/3, alone 1/2 + 2 log(gamma/2): equal at gamma = 2 exp(-13/12) = 0.6769
    assert len(found.neurons) == width


@pytest.mark.parametrize(("gamma", "width"), [(0.67, 2), (0.68, 3), (1.35, 3), (1.36, 4)])
def test_the_second_new_neuron_costs_2_log_2_more(gamma, width):
    clients = [local([[2], [2]]), local([[-1], [-1]])]

    found = match(clients, prior(1, gamma=gamma), sweeps=0, rng=rng())

    # as above, and 1/2 + 2 log(gamma/2) - 2 log 2 = -5/3 at gamma = 4 exp(-13/12) = 1.3539
    assert len(found.neurons) == width


# --- what a match brings ---


def test_a_match_brings_as_much_as_the_formula_says():
    draw = rng()
    A, P = draw.normal(size=(4, 6)), draw.uniform(1, 3, (4, 6))
    (client,) = random_clients(1, 3, 6, seed=1)
    s, v = client.precision, client.values

    found = gains(A, P, client)

    for l in range(3):  # noqa: E741
        for i in range(4):
            assert found[l, i] == pytest.approx(sum((A[i] + s * v[l]) ** 2 / (P[i] + s) - A[i] ** 2 / P[i]))


def best_log_density(members, mean, precision):
    """The largest log density, up to a constant, of (value, precision) around a neuron that the prior knows."""

    def minus(theta):
        fit = sum((s * (v - theta) ** 2).sum() for v, s in members)
        return (fit + (precision * (theta - mean) ** 2).sum()) / 2

    return -minimize(minus, mean, tol=1e-12).fun


def test_a_match_brings_twice_the_gain_in_log_density_at_the_best_global_neuron():
    mean, precision = np.array([0.5, -1.0]), np.array([0.7, 1.3])
    one, other, third = random_clients(3, 1, 2, seed=3)
    pool = Pool(Prior(mean, precision), 3)
    pool.open(1)
    for client in (one, other):
        pool.add(client, np.array([0]))

    (found,) = gains(pool.weighted, pool.precision, third).ravel()

    members = [(client.values[0], client.precision) for client in (one, other, third)]
    gain = best_log_density(members, mean, precision) - best_log_density(members[:2], mean, precision)
    # s v^2 is what the neuron costs wherever it goes
    assert found == pytest.approx(2 * gain + (third.precision * third.values[0] ** 2).sum(), abs=1e-6)


@pytest.fixture
def used_pool():
    """A pool of 13 clients with neurons that 1, 2 and 12 clients use, all of weight 0."""

    def make(**settings):
        pool = Pool(prior(1, **settings), 13)
        pool.open(3)
        for i, uses in enumerate((1, 2, 12)):
            for _ in range(uses):
                pool.add(local([[0.0]]), np.array([i]))
        return pool

    return make


def test_a_neuron_is_the_more_attractive_the_more_clients_use_it(used_pool):
    (found,) = used_pool(count_cap=12).profits(local([[0.0]]))

    # log(c / (13 - c)), and 2 log(1/13) for a new one: a weight of 0 at neurons of 0 brings nothing else
    assert found.tolist() == pytest.approx([log(1 / 12), log(2 / 11), log(12), -2 * log(13)])


def test_ten_uses_are_as_attractive_as_it_gets(used_pool):
    (found,) = used_pool().profits(local([[0.0]]))

    assert found[:3].tolist() == pytest.approx([log(1 / 12), log(2 / 11), log(10 / 3)])


def test_the_log_odds_of_use_can_be_weighted(used_pool):
    (found,) = used_pool(count_weight=2.0).profits(local([[0.0]]))

    assert found[:3].tolist() == pytest.approx([2 * log(1 / 12), 2 * log(2 / 11), 2 * log(10 / 3)])


# --- the posterior ---


def log_posterior_of_one(own, clients, assignments, j, known):
    """Twice the log posterior of where client j's neurons are, given all others; `own` may name new neurons."""
    uses = {}
    for other, used in enumerate(assignments):
        if other != j:
            for l, i in enumerate(used):  # noqa: E741
                uses.setdefault(int(i), []).append((clients[other].values[l], clients[other].precision))
    counts = {i: len(members) for i, members in uses.items()}
    for l, i in enumerate(own):  # noqa: E741
        uses.setdefault(int(i), []).append((clients[j].values[l], clients[j].precision))
    J, new = len(clients), sum(i not in counts for i in own)
    # odds m / J against 1 - m / J of using a neuron that m others use, and a Poisson number of new ones
    odds = sum(log(counts[i] / (J - counts[i])) for i in own if i in counts)
    poisson = new * log(known.gamma / J) - sum(log(k) for k in range(1, new + 1))
    return 2 * (sum(profile(members, known) for members in uses.values()) + odds + poisson)


def profile(members, known):
    """The log density at the best global neuron; its mean weighs all by their precisions."""
    total = known.precision + sum(s for _, s in members)
    theta = (known.precision * known.mean + sum(s * v for v, s in members)) / total
    fit = sum((s * (v - theta) ** 2).sum() for v, s in members)
    return -(fit + (known.precision * (theta - known.mean) ** 2).sum()) / 2


@pytest.mark.parametrize("seed", range(8))
def test_no_client_could_be_matched_better(seed):
    clients = random_clients(4, 2, 3, seed=seed, spread=1.5)
    known = prior(3, mean=0.6, precision=0.5, count_weight=2.0)

    found = match(clients, known, sweeps=20, rng=rng(seed))

    for j in range(4):
        others = {int(i) for k in range(4) if k != j for i in found.assignments[k]}
        places = [*sorted(others), "new", "another new"]
        scores = [
            log_posterior_of_one(own, clients, found.assignments, j, known) for own in enumerated(places, width=2)
        ]
        here = log_posterior_of_one(found.assignments[j].tolist(), clients, found.assignments, j, known)
        assert here == pytest.approx(max(scores))
        assert min(scores) < here - 1.0  # it does matter where they go


def enumerated(places, width):
    """All ways to give different places to neurons; the new ones are named by numbers that nobody has."""
    names = {"new": -1, "another new": -2}
    return [[names.get(place, place) for place in own] for own in permutations(places, width)]


def test_these_matchings_both_share_and_open_neurons():
    """So that the test above sees both."""
    known = prior(3, mean=0.6, precision=0.5, count_weight=2.0)
    found = [match(random_clients(4, 2, 3, seed=seed, spread=1.5), known, 20, rng(seed)) for seed in range(8)]

    assert sum((matching.counts > 1).sum() for matching in found) >= 8
    assert sum((matching.counts == 1).sum() for matching in found) >= 8


@pytest.mark.parametrize("sweeps", [0, 1, 5])
def test_global_neurons_are_the_weighted_means_of_those_matched_to_them(sweeps):
    clients = random_clients(5, 8, 3, seed=1, spread=2.0)
    known = prior(3, mean=0.4, precision=0.5)

    found = match(clients, known, sweeps, rng())

    A, P = (np.tile(row, (len(found.counts), 1)) for row in (known.precision * known.mean, known.precision))
    counts = np.zeros(len(found.counts), dtype=int)
    for client, used in zip(clients, found.assignments, strict=True):
        assert len(set(used.tolist())) == 8  # no two of a client at the same place
        for value, i in zip(client.values, used, strict=True):
            A[i] += client.precision * value
            P[i] += client.precision
            counts[i] += 1
    np.testing.assert_allclose(found.neurons, A / P)
    assert found.counts.tolist() == counts.tolist()
    assert counts.min() > 0
    assert 8 < len(counts) < 40


def test_one_client_is_only_drawn_towards_the_prior():
    (client,) = random_clients(1, 5, 4, seed=0)
    known = prior(4, mean=0.3, precision=2.0)

    found = match([client], known, sweeps=5, rng=rng())

    expected = (2.0 * 0.3 + client.precision * client.values) / (2.0 + client.precision)
    np.testing.assert_allclose(found.neurons[found.assignments[0]], expected)


# --- known answers ---


@pytest.mark.parametrize("sweeps", [0, 5])
def test_copies_in_another_order_are_matched_perfectly(sweeps):
    draw = rng()
    values = draw.normal(size=(100, 20))
    orders = [draw.permutation(100) for _ in range(5)]

    found = match([local(values[order]) for order in orders], prior(20, precision=1e-9), sweeps, rng())

    assert len(found.neurons) == 100
    for order, used in zip(orders, found.assignments, strict=True):
        np.testing.assert_allclose(found.neurons[used], values[order], atol=1e-6)


def test_what_a_client_knows_nothing_of_does_not_matter():
    clients = random_clients(3, 6, 4, seed=2)
    clients[1].precision[2] = 0.0
    changed = local(clients[1].values + np.array([0, 0, 100.0, 0]), clients[1].precision)

    one = match(clients, prior(4), 5, rng())
    other = match([clients[0], changed, clients[2]], prior(4), 5, rng())

    assert as_lists(one) == as_lists(other)
    np.testing.assert_allclose(one.neurons, other.neurons)


def test_what_nobody_knows_anything_of_is_as_the_prior_says():
    clients = random_clients(3, 6, 4, seed=2)
    for client in clients:
        client.precision[2] = 0.0

    found = match(clients, prior(4, mean=0.7), 5, rng())

    np.testing.assert_allclose(found.neurons[:, 2], 0.7)


@pytest.mark.parametrize(("max_width", "width"), [(4, 4), (6, 6), (19, 19), (700, 20)])
def test_there_are_never_more_neurons_than_allowed(max_width, width):
    # 5 clients with 4 neurons each, all at right angles and far apart
    clients = [local(100 * np.eye(20)[4 * j : 4 * j + 4]) for j in range(5)]

    found = match(clients, prior(20, max_width=max_width), 3, rng())

    assert len(found.neurons) == width


def test_clients_may_have_different_numbers_of_neurons():
    clients = [local([[5.0, 0]]), local([[0, 5.0], [5, 0], [-5, 0]]), local([[-5, 0], [0, 5]])]

    found = match(clients, prior(2), sweeps=0, rng=rng())

    # the largest client is the first, so its neurons have the first numbers
    assert as_lists(found) == [[1], [0, 1, 2], [2, 0]]


def test_a_larger_mass_opens_more_neurons():
    clients = random_clients(5, 8, 6, seed=1)

    widths = [len(match(clients, prior(6, gamma=gamma), 5, rng()).counts) for gamma in (1e-3, 1.0, 50.0)]

    assert widths == sorted(widths)
    assert widths[0] < widths[-1]


# --- going on from an earlier matching ---


def test_without_sweeps_it_stays_where_it_starts_whatever_the_names():
    clients = [local([[2, 0], [0, 2]]), local([[0, 1], [3, 0]])]

    found = match(clients, prior(2), 0, rng(), start=[np.array([7, 3]), np.array([7, 9])])

    assert as_lists(found) == [[1, 0], [1, 2]]
    # 3: (0, 2)/2; 7: (2, 1)/3; 9: (3, 0)/2
    np.testing.assert_allclose(found.neurons, [[0, 1], [2 / 3, 1 / 3], [1.5, 0]])
    assert found.counts.tolist() == [1, 2, 1]


def test_sweeps_mend_a_bad_start():
    clients = [local([[2, 0], [0, 2]]), local([[0, 1], [3, 0]])]

    found = match(clients, prior(2), 1, rng(), start=[np.array([7, 3]), np.array([7, 9])])

    first, second = as_lists(found)
    assert first == second[::-1]
    assert len(found.counts) == 2


def test_a_start_is_what_the_sweeps_begin_with():
    clients = [local([[1.0]]), local([[-1.0]]), local([[1.0]]), local([[-1.0]])]

    together = match(clients, prior(1), 5, rng(), start=[np.array([0])] * 4)
    apart = match(clients, prior(1), 5, rng(), start=[np.array([0]), np.array([1])] * 2)

    # -1 taken out of A = 0, P = 5, c = 4: back there it brings 0 - 1/4 + log 3 = 0.85, alone 1/2 - 2 log 4 = -2.27
    assert together.counts.tolist() == [4]
    # taken out of A = -2, P = 3: back there 4/3 - 1/2 + log(1/3) = -0.27, to A = 2, P = 3: 1/4 - 4/3 + log 1 = -1.08
    assert sorted(apart.counts.tolist()) == [2, 2]


def test_the_order_of_the_sweeps_comes_from_the_generator():
    clients = random_clients(5, 8, 6, seed=4)

    assert as_lists(match(clients, prior(6), 1, rng(1))) == as_lists(match(clients, prior(6), 1, rng(1)))
    assert as_lists(match(clients, prior(6), 1, rng(1))) != as_lists(match(clients, prior(6), 1, rng(2)))


def test_arguments_are_left_alone():
    clients = random_clients(3, 4, 2, seed=0)
    before = [(client.values.copy(), client.precision.copy()) for client in clients]
    known, start = prior(2, mean=0.5), [np.array([0, 1, 2, 3])] * 3

    match(clients, known, 3, rng(), start)
    match(clients, known, 3, rng())

    for client, (values, precision) in zip(clients, before, strict=True):
        assert np.array_equal(client.values, values)
        assert np.array_equal(client.precision, precision)
    assert known.mean.tolist() == [0.5, 0.5]
    assert known.precision.tolist() == [1.0, 1.0]
    assert all(used.tolist() == [0, 1, 2, 3] for used in start)

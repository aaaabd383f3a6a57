"""Addressed randomness: the same address is the same stream, any other address is another stream."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedbench.algorithm import Ctx
from fedbench.rng import derived_seed, numpy_rng, torch_rng

CPU = torch.device("cpu")
ADDRESS = (3, "noise", 7, 2)

addresses = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from(["partition", "init", "cohort", "batches", "noise"]),
    st.integers(0, 10_000),
    st.none() | st.integers(0, 10_000),
)


def draw(seed, purpose, round_, client):
    return torch.rand(4, generator=torch_rng(seed, purpose, round_, client, CPU))


def test_the_same_address_gives_the_same_stream():
    assert torch.equal(draw(*ADDRESS), draw(*ADDRESS))


@pytest.mark.parametrize(
    "other",
    [(4, "noise", 7, 2), (3, "batches", 7, 2), (3, "noise", 8, 2), (3, "noise", 7, 1), (3, "noise", 7, None)],
    ids=["seed", "purpose", "round", "client", "server"],
)
def test_a_change_of_any_part_of_the_address_gives_another_stream(other):
    assert not torch.equal(draw(*ADDRESS), draw(*other))


@given(addresses, addresses)
def test_seeds_are_equal_exactly_when_addresses_are(one, other):
    assert (derived_seed(*one) == derived_seed(*other)) == (one == other)


@given(addresses)
def test_a_derived_seed_fits_into_63_bits(address):
    # torch.Generator.manual_seed takes a signed 64-bit number
    assert 0 <= derived_seed(*address) < 2**63


def test_numbers_that_run_together_are_different_addresses():
    # round 1, client 12 and round 11, client 2 would be one address if the parts were glued without a mark
    assert derived_seed(0, "noise", 1, 12) != derived_seed(0, "noise", 11, 2)


def test_derived_seeds_stay_what_they_were():
    # Recorded: a change here makes every stored result irreproducible and needs a new ENGINE_VERSION.
    # blake2b("3|noise|7|2", 8 bytes), big-endian, shifted right by one
    assert derived_seed(3, "noise", 7, 2) == 8685789467162023988


def test_numpy_and_torch_streams_do_not_touch_the_global_generators():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

    draw(*ADDRESS)
    numpy_rng(0, "cohort", 1).random(4)

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_a_context_draws_from_its_own_round_and_client(make_ctx):
    ctx = make_ctx(round_=7, client=1, seed=3)

    drawn = torch.rand(4, generator=ctx.rng("noise"))

    assert torch.equal(drawn, draw(3, "noise", 7, 1))


def test_a_context_starts_a_purpose_afresh_at_every_call(make_ctx):
    ctx = make_ctx(client=0)

    first, second = (torch.rand(4, generator=ctx.rng("noise")) for _ in range(2))

    assert torch.equal(first, second)


def test_every_method_that_samples_uniformly_meets_the_same_cohorts(make_ctx, make_algorithm):
    ctx = make_ctx(clients=10, f=0.3)
    rounds = [Ctx(ctx.task, ctx.protocol, seed=5, round=number) for number in range(1, 6)]

    cohorts = {
        method: [make_algorithm(method).select({}, {}, now).report for now in rounds]
        for method in ("fedavg", "fedprox")
    }

    assert cohorts["fedavg"] == cohorts["fedprox"]


def test_a_method_that_trains_everyone_reports_the_cohort_of_the_others(make_ctx, make_algorithm):
    sampled = make_ctx("fedavg", clients=10, f=0.3)
    everyone = make_ctx("pfedbayes", clients=10, f=0.3)

    fedavg = make_algorithm("fedavg").select({}, {}, sampled)
    pfedbayes = make_algorithm("pfedbayes").select({}, {}, everyone)

    assert pfedbayes.report == fedavg.report == fedavg.train
    assert pfedbayes.train == tuple(range(10))


def test_cohorts_differ_between_rounds_and_between_seeds(make_ctx, make_algorithm):
    ctx = make_ctx(clients=10, f=0.3)
    algorithm = make_algorithm("fedavg")

    cohorts = [
        algorithm.select({}, {}, Ctx(ctx.task, ctx.protocol, seed, round_)).report
        for seed, round_ in itertools.product((0, 1), range(1, 6))
    ]

    # 120 possible cohorts of 3 of 10: ten draws are hardly ever all equal
    assert len(set(cohorts)) > 5


@pytest.mark.parametrize(
    ("f", "clients", "expected"),
    [(0.3, 10, 3), (0.29, 10, 2), (0.01, 10, 1), (1.0, 10, 10), (0.29, 100, 29)],
    ids=["a third", "rounded down", "at least one", "all", "0.29 * 100 is 28.999999999999996"],
)
def test_a_cohort_has_floor_of_f_n_clients_and_at_least_one(make_job, make_algorithm, f, clients, expected):
    ctx = Ctx(SimpleNamespace(members=tuple(range(clients))), make_job(f=f).protocol, seed=0, round=1)

    cohort = make_algorithm("fedavg").select({}, {}, ctx)

    assert len(set(cohort.report)) == expected
    assert list(cohort.report) == sorted(cohort.report)

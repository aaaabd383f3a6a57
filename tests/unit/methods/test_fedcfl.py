"""FedCFL: when a cluster splits and how, by hand; that it is FedAvg until then; and that its growing state is kept."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from fedbench.algorithm import Upload
from fedbench.algorithms.fedcfl import opposed
from fedbench.simulation import Surroundings, simulate
from fedbench.wire import on_wire, size_of

OPPOSED = {0: (3.0, 0.0), 1: (-3.0, 0.5), 2: (3.0, 1.0), 3: (-3.0, -1.5)}
"""Updates of four clients whose mean is 0: clients 0 and 2 against 1 and 3."""


def uploads(updates, base=(1.0, 1.0), n=None):
    """Models that differ from `base` by these updates."""
    moved = {client: torch.tensor(base) + torch.tensor(update) for client, update in updates.items()}
    return [Upload(client, (n or {}).get(client, 1), {"w": w}) for client, w in moved.items()]


def state(models, assigned, largest=()):
    return {
        "w": torch.tensor(models),
        "assigned": torch.tensor(assigned, dtype=torch.int32),
        "largest": torch.tensor(largest, dtype=torch.float32),
    }


def one_cluster(largest=()):
    return state([[1.0, 1.0]], [0] * 4, largest)


@pytest.fixture
def now(make_ctx):
    """The context of a round of four clients."""
    return lambda round_=21, **settings: make_ctx("fedcfl", round_=round_, clients=4, **settings)


# --- a golden split ---


def test_a_cluster_whose_clients_pull_apart_is_split_in_two(now, make_algorithm):
    server = make_algorithm("fedcfl").aggregate(one_cluster([3.0]), iter(uploads(OPPOSED)), now())

    # The mean update is (0, 0), the longest (-3, -1.5). Clients 0 and 2 keep the cluster, with the mean of their
    # models, (1, 1) + (3, 0.5); clients 1 and 3 begin another, with (1, 1) + (-3, -0.5).
    assert server["w"].tolist() == [[4.0, 1.5], [-2.0, 0.5]]
    assert server["assigned"].tolist() == [0, 1, 0, 1]
    assert server["assigned"].dtype == torch.int32


def test_a_cluster_whose_clients_agree_is_averaged(now, make_algorithm):
    updates = {0: (3.0, 0.0), 1: (1.0, 2.0), 2: (3.0, 1.0), 3: (1.0, 1.0)}

    server = make_algorithm("fedcfl").aggregate(one_cluster([3.0]), uploads(updates, n={0: 9}), now())

    # (8, 4) / 4, whatever the clients' sizes
    assert server["w"].tolist() == [[3.0, 2.0]]
    assert server["assigned"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("beta", "models"),
    [(1.0, [[3.0, 1.0], [5.0, 8.0], [5.0, 2.0]]), (0.5, [[2.0, 1.0], [5.0, 6.5], [5.0, 3.5]])],
    ids=["all the way to the averages", "half of the way from the cluster's model"],
)
def test_every_cluster_is_looked_at_by_itself_and_the_numbers_of_others_stay(make_ctx, make_algorithm, beta, models):
    ctx = make_ctx("fedcfl", round_=21, clients=8, labels_per_client=2, beta=beta)
    torn, agreed = {4: (0.0, 3.0), 5: (0.0, -3.0), 6: (0.0, 3.0), 7: (0.0, -3.0)}, dict.fromkeys(range(4), (2.0, 0.0))
    server = state([[1.0, 1.0], [5.0, 5.0]], [0] * 4 + [1] * 4, [3.0])

    grown = make_algorithm("fedcfl").aggregate(server, uploads(agreed) + uploads(torn, (5.0, 5.0)), ctx)

    assert grown["w"].tolist() == models
    assert grown["assigned"].tolist() == [0, 0, 0, 0, 1, 2, 1, 2]


def test_groups_with_opposite_gradients_are_separated_exactly():
    # 20 clients in 1,000 dimensions around one direction or its opposite: within a group cos is about 1/2 (noise of the
    # same length as the signal), between them about -1/2, with a standard deviation of 1/sqrt(1000)
    rng = np.random.default_rng(0)
    side = rng.permutation([1] * 7 + [-1] * 13)
    signal = rng.standard_normal(1000)
    updates = torch.from_numpy(side[:, None] * signal + rng.standard_normal((20, 1000))).float()

    leaving = opposed(updates)

    assert leaving.tolist() == (side != side[0]).tolist()


def test_the_length_of_an_update_does_not_matter_for_its_side(now, make_algorithm):
    # together (0, 0); a Euclidean clustering would put the two short ones together
    updates = {0: (100.0, 0.0), 1: (-1.0, 0.0), 2: (1.0, 0.0), 3: (-100.0, 0.0)}

    server = make_algorithm("fedcfl").aggregate(one_cluster([100.0]), uploads(updates), now())

    assert server["assigned"].tolist() == [0, 1, 0, 1]


def directions(*angles, lengths=None):
    """Vectors in the plane at these angles in degrees."""
    radians = torch.tensor(angles).deg2rad()
    return torch.stack([radians.cos(), radians.sin()], 1) * torch.tensor(lengths or [1.0] * len(angles))[:, None]


def test_sides_are_told_apart_by_complete_linkage():
    # 61 and 90 join, 0 and 30 join; then 126 is 65 degrees from the farthest of the former, which are 90 from the
    # latter. By single linkage 126 would be alone, behind the widest gap.
    assert opposed(directions(0.0, 30.0, 61.0, 90.0, 126.0)).tolist() == [False, False, True, True, True]


def test_sides_are_told_apart_by_angles_alone():
    # the inner product is largest between the long ones, at 0 and 70 degrees
    assert opposed(directions(0.0, 20.0, 70.0, lengths=[10.0, 1.0, 10.0])).tolist() == [False, False, True]


# --- special case ---


@pytest.mark.parametrize("protocol", [{}, {"weighting": "samples", "beta": 0.5}])
def test_without_a_split_it_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, protocol):
    ctx = make_ctx("fedcfl", round_=0, clients=4, tau=2, **protocol)
    fedcfl, fedavg = make_algorithm("fedcfl"), make_algorithm("fedavg")

    clustered, plain = run_rounds(fedcfl, ctx, rounds=4), run_rounds(fedavg, ctx, rounds=4)

    assert clustered.server["w"].shape == (1, 7_510)
    assert torch.equal(clustered.server["w"][0], plain.server["w"])
    data, where = ctx.task.train_data(1), ctx.at(1)
    one, other = (a.personal_model(p.server, {}, data, where, 1) for a, p in ((fedcfl, clustered), (fedavg, plain)))
    assert torch.equal(one["w"], other["w"])


# --- when a cluster splits ---


def is_split(algorithm, ctx, updates=OPPOSED, largest=(3.0,), n=None):
    server = state([[1.0, 1.0]], [0] * 4, largest)
    return len(algorithm.aggregate(server, uploads(updates, n=n), ctx)["w"]) == 2


def test_not_in_the_first_rounds(now, make_algorithm):
    assert [is_split(make_algorithm("fedcfl"), now(number)) for number in (20, 21)] == [False, True]
    assert [is_split(make_algorithm("fedcfl", split_after=3), now(number)) for number in (3, 4)] == [False, True]


def test_not_with_two_clients(now, make_algorithm):
    two, three = ({client: OPPOSED[client] for client in range(k)} for k in (2, 3))
    algorithm = make_algorithm("fedcfl", eps1=0.9)

    # the mean of the first three, (1, 0.5), is shorter than 0.9 * 3
    assert [is_split(algorithm, now(), updates) for updates in (two, three)] == [False, True]


def shifted(by):
    """The updates whose mean is (by, 0)."""
    return {client: (x + by, y) for client, (x, y) in OPPOSED.items()}


@pytest.mark.parametrize(
    ("params", "largest", "by", "split"),
    [
        # the median of the first rounds' longest updates is 4: eps1 = 0.4 * 4 = 1.6
        ({}, [9.0, 4.0, 1.0, 2.0, 8.0], 1.59, True),
        ({}, [9.0, 4.0, 1.0, 2.0, 8.0], 1.61, False),
        ({"eps1": 0.2}, [9.0, 4.0, 1.0, 2.0, 8.0], 0.79, True),
        ({"eps1": 0.2}, [9.0, 4.0, 1.0, 2.0, 8.0], 0.81, False),
        ({"thresholds": "absolute"}, [9.0, 4.0, 1.0, 2.0, 8.0], 0.39, True),
        ({"thresholds": "absolute"}, [9.0, 4.0, 1.0, 2.0, 8.0], 0.41, False),
    ],
)
def test_only_when_the_mean_update_is_short(now, make_algorithm, params, largest, by, split):
    assert is_split(make_algorithm("fedcfl", **params), now(), shifted(by), largest) is split


@pytest.mark.parametrize(
    ("params", "largest", "split"),
    [
        # the longest update is sqrt(3^2 + 1.5^2) = 3.3541; default 0.6 times the median
        ({}, [5.58] * 5, True),
        ({}, [5.60] * 5, False),
        ({"eps2": 1.0}, [3.35] * 5, True),
        ({"eps2": 1.0}, [3.36] * 5, False),
        ({"thresholds": "absolute"}, [99.0] * 5, True),  # 1.6
        ({"thresholds": "absolute", "eps2": 3.36}, [99.0] * 5, False),
    ],
)
def test_only_when_a_clients_update_is_long(now, make_algorithm, params, largest, split):
    assert is_split(make_algorithm("fedcfl", **params), now(), largest=largest) is split


def test_by_default_the_absolute_threshold_is_that_of_the_public_code(now, make_algorithm):
    algorithm = make_algorithm("fedcfl", thresholds="absolute")

    found = [is_split(algorithm, now(), {0: (x, 0.0), 1: (-x, 0.0), 2: (x, 0.0), 3: (-x, 0.0)}) for x in (1.59, 1.61)]

    assert found == [False, True]


def test_the_mean_is_weighted_as_the_average_is(now, make_algorithm):
    # by samples, client 0 makes the mean (3 * 97 - 3) / 100 long
    found = [is_split(make_algorithm("fedcfl"), now(weighting=how), n={0: 97}) for how in ("uniform", "samples")]

    assert found == [True, False]


def test_the_unit_of_the_thresholds_comes_from_the_first_five_rounds(now, make_algorithm):
    algorithm, server = make_algorithm("fedcfl"), one_cluster()

    for number, length in enumerate([5.0, 3.0, 4.0, 2.0, 6.0, 100.0, 200.0], 1):
        updates = {client: (length / (client + 1), 0.0) for client in range(4)}
        server = algorithm.aggregate(server, uploads(updates, server["w"][0].tolist()), now(number))

    assert server["largest"].tolist() == pytest.approx([5.0, 3.0, 4.0, 2.0, 6.0], rel=1e-5)


def test_in_the_very_first_round_that_round_is_the_unit(now, make_algorithm):
    assert is_split(make_algorithm("fedcfl", split_after=0), now(1), largest=())


# --- who takes part, and what travels ---


def test_all_members_take_part_whatever_the_protocol_says(make_ctx, make_algorithm):
    ctx = make_ctx("fedcfl", clients=5, f=0.2, newcomers=1)

    cohort = make_algorithm("fedcfl").select({}, {}, ctx)

    assert cohort.train == cohort.report == (1, 2, 3, 4)


def test_a_newcomer_belongs_to_the_largest_cluster(make_ctx, make_algorithm):
    ctx = make_ctx("fedcfl", round_=21, clients=4, newcomers=1)
    algorithm = make_algorithm("fedcfl", eps1=0.9)
    before = algorithm.init_server(ctx)["assigned"].tolist()

    sent = uploads({1: (-3.0, 0.0), 2: (3.0, 0.0), 3: (3.0, 1.0)})
    server = algorithm.aggregate(state([[1.0, 1.0]], before, [3.0]), sent, ctx)

    assert before == [-1, 0, 0, 0]
    assert server["assigned"].tolist() == [-1, 0, 1, 1]
    assert algorithm.download(server, ctx.at(0))["w"].tolist() == [4.0, 1.5]


def test_only_the_own_model_travels(make_ctx, make_algorithm):
    ctx = make_ctx("fedcfl", client=1)
    algorithm = make_algorithm("fedcfl")
    server = algorithm.init_server(ctx)
    grown = {**server, "w": server["w"].repeat(3, 1), "assigned": torch.tensor([0, 2], dtype=torch.int32)}

    down = algorithm.download(grown, ctx)
    up, _ = algorithm.update(down, {}, ctx.task.train_data(1), ctx)

    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4 * 7_510


# --- a state that grows ---


def test_a_run_that_splits_survives_stops_bit_for_bit(make_job, new_recorder, tmp_path):
    halves = {"clients": 4, "partition": "clusters", "labels_per_client": 5, "labels": "shift"}
    job = make_job(
        "fedcfl", rounds=5, lr=0.1, split_after=2, eps1=1.0, rule="best_all", eval_every=1, adapt_epochs=[1], **halves
    )
    whole, halved = new_recorder(), new_recorder()

    simulate(job, whole, Surroundings(tmp_path / "whole"))
    for stop in (2, 3, 4, 99):
        simulate(job, halved, Surroundings(tmp_path / "halved", should_stop=lambda at=stop: halved.last_round() >= at))

    def clusters(recorder):
        curve = recorder.evaluations(stage="train", view="gm")
        return [sum(name.startswith("in_cluster") for name in e.metrics[None]) for e in curve]

    assert clusters(whole) == [1, 1, 2, 2, 2]
    assert whole.evaluations() == halved.evaluations()
    assert whole.evaluations(stage="best") != []


@pytest.mark.parametrize(
    "params", [{"eps1": 0}, {"eps2": -1}, {"thresholds": "none"}, {"split_after": -1}, {"eps": 0.4}]
)
def test_bad_values_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("fedcfl", **params)

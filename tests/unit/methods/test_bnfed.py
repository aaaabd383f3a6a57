"""BNFed by hand: what the clients do, what the server makes of it, and the cases in which nothing needs matching."""

import pytest
import torch
from pydantic import ValidationError

from fedbench.algorithm import Ctx, Upload
from fedbench.algorithms import bnfed
from fedbench.algorithms.bnfed import neurons_of, pack, unpack
from fedbench.errors import FedbenchError
from fedbench.training import fine_tune

WIDTH = 100
"""Hidden neurons of dnn100."""


@pytest.fixture
def small(add_dataset, make_ctx):
    """A context on images of two pixels and two classes: a neuron is (two inputs, bias, two outputs)."""
    add_dataset("dots", torch.arange(32).view(16, 1, 1, 2), [0, 1] * 8, per_class=(1, 1))
    fixed = {"dataset": "dots", "model": "dnn100", "labels_per_client": 2}
    return lambda **settings: make_ctx("bnfed", **{**fixed, **settings})


def network(neurons, bias=(0.0, 0.0)):
    return pack(torch.as_tensor(neurons, dtype=torch.float32), torch.tensor(bias))


def upload(client, w, classes=(1, 1)):
    return Upload(client, sum(classes), {"w": w, "classes": torch.tensor(classes, dtype=torch.int32)})


def distinct(*first):
    """100 neurons of which each is far from the others; the first one as given."""
    neurons = torch.zeros(WIDTH, 5)
    neurons[:, 0] = 10.0 * torch.arange(WIDTH)
    neurons[0] = torch.tensor(first)
    return neurons


def random_network(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(WIDTH, 5, generator=draw), torch.randn(2, generator=draw)


def at_round(ctx, number):
    return Ctx(ctx.task, ctx.protocol, ctx.seed, number)


# --- neurons ---


def test_a_network_is_its_neurons(make_ctx):
    net = make_ctx("bnfed", model="mlp256").task.net
    vector = torch.arange(net.d, dtype=torch.float32)

    neurons, bias = unpack(vector, net)

    # 64-256-10: neuron 3 has row 3 of the first matrix, bias 3 behind it, column 3 of the second, in steps of 256
    assert neurons.shape == (256, 64 + 1 + 10)
    assert neurons[3, :64].tolist() == list(range(3 * 64, 4 * 64))
    assert neurons[3, 64] == 256 * 64 + 3
    assert neurons[3, 65:].tolist() == [256 * 64 + 256 + 3 + 256 * c for c in range(10)]
    assert bias.tolist() == list(range(net.d - 10, net.d))
    assert torch.equal(pack(neurons, bias), vector)


def test_the_global_network_predicts_like_a_network_of_its_width(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed")
    algorithm, x = make_algorithm("bnfed"), ctx.task.test_data(0).x

    by_neurons = algorithm.predict(algorithm.init_server(ctx), x, ctx, "mean")
    by_network = algorithm.predict({"w": ctx.task.initial}, x, ctx, "mean")

    torch.testing.assert_close(by_neurons, by_network)


def test_neurons_that_say_nothing_change_no_prediction(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed")
    algorithm, x = make_algorithm("bnfed"), ctx.task.test_data(0).x
    server = algorithm.init_server(ctx)
    mute = torch.ones(7, 75)
    mute[:, -10:] = 0.0

    wider = {**server, "neurons": torch.cat([server["neurons"], mute])}

    torch.testing.assert_close(algorithm.predict(wider, x, ctx, "mean"), algorithm.predict(server, x, ctx, "mean"))


# --- the server by hand ---


def test_one_merge_of_two_clients(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed", sigma=0.5, sigma0=2.0)
    one = upload(0, network(distinct(1, 2, 0.3, 4, 5), bias=(1.0, -1.0)), classes=(3, 1))
    # the same neurons, in the opposite order
    other = upload(1, network(distinct(2, 2, 0.1, 8, 7).flip(0), bias=(3.0, 7.0)), classes=(1, 0))

    server = algorithm.aggregate(algorithm.init_server(ctx), [one, other], ctx)

    assert server["neurons"].shape == (WIDTH, 5)
    assert server["counts"].tolist() == [2] * WIDTH
    assert server["assignment"][0].tolist() == server["assignment"][1].flip(0).tolist()
    merged = server["neurons"][server["assignment"][0, 0]]
    # s0 = 1/2; inputs and bias with s = 2 each: 2 (1 + 2) / 4.5, 2 (2 + 2) / 4.5, (0.5 * 0.1 + 2 (0.3 + 0.1)) / 4.5
    # outputs: of class 0 client 0 has 3 of 4 samples, s = 1.5 and 0.5: (1.5 * 4 + 0.5 * 8) / (0.5 + 2);
    # of class 1 it has all, s = 2 and 0: 2 * 5 / (0.5 + 2)
    assert merged.tolist() == pytest.approx([6 / 4.5, 8 / 4.5, 0.85 / 4.5, 4.0, 4.0])
    # (0.5 * 0.1 + 1.5 * 1 + 0.5 * 3) / 2.5 and (0.5 * 0.1 + 2 * -1) / 2.5
    assert server["bias"].tolist() == pytest.approx([1.22, -0.78])


def test_a_neuron_that_only_one_client_has_stays_its_own(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed", sigma=0.5, sigma0=2.0)
    one = upload(0, network(distinct(1, 2, 0.3, 4, 5)))
    other = upload(1, network(distinct(-900, 0, 0, 0, 0)))

    server = algorithm.aggregate(algorithm.init_server(ctx), [one, other], ctx)

    assert sorted(server["counts"].tolist()) == [1, 1] + [2] * 99
    assert server["neurons"].shape == (WIDTH + 1, 5)
    # -900 * 2 / 2.5, and the prior's 0.1 * 0.5 / 2.5 in the bias
    alone = server["neurons"][server["assignment"][1, 0]]
    assert alone.tolist() == pytest.approx([-720.0, 0.0, 0.02, 0.0, 0.0])
    assert algorithm.describe(server, ctx) == {"width": 101.0}


def test_a_client_alone_is_drawn_towards_the_prior(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed", sigma=0.5, sigma0=2.0)
    neurons, bias = random_network(0)

    server = algorithm.aggregate(algorithm.init_server(ctx), [upload(1, pack(neurons, bias), (4, 9))], ctx)

    # (0.5 mu0 + 2 v) / 2.5, the client having all samples of both classes
    expected = 0.8 * neurons
    expected[:, 2] += 0.02
    torch.testing.assert_close(server["neurons"][server["assignment"][1]], expected)
    torch.testing.assert_close(server["bias"], 0.8 * bias + 0.02)


def test_networks_that_differ_in_the_order_of_neurons_are_one_network(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed", clients=4)
    algorithm = make_algorithm("bnfed", sigma0=1e8)
    neurons, bias = unpack(10 * ctx.task.initial, ctx.task.net)
    draw = torch.Generator().manual_seed(0)
    sent = [upload(client, pack(neurons[torch.randperm(WIDTH, generator=draw)], bias), [5] * 10) for client in range(4)]

    server = algorithm.aggregate(algorithm.init_server(ctx), sent, ctx)

    assert len(server["neurons"]) == WIDTH
    assert server["counts"].tolist() == [4] * WIDTH
    x = ctx.task.test_data(0).x
    torch.testing.assert_close(
        algorithm.predict(server, x, ctx, "mean"), algorithm.predict({"w": 10 * ctx.task.initial}, x, ctx, "mean")
    )


def test_the_prior_decides_on_a_class_that_nobody_has(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed", mu0=0.25)
    sent = [upload(client, pack(*random_network(client)), classes=(3, 0)) for client in range(2)]

    server = algorithm.aggregate(algorithm.init_server(ctx), sent, ctx)

    assert server["neurons"][:, 4].tolist() == [0.25] * len(server["neurons"])
    assert server["bias"][1].item() == pytest.approx(0.1)
    assert server["neurons"][:, 3].std() > 0.1


def test_the_order_of_the_uploads_does_not_matter(small, make_algorithm):
    ctx = small(clients=4)
    algorithm = make_algorithm("bnfed")
    sent = [upload(client, pack(*random_network(client)), classes=(client, 3 - client)) for client in range(4)]
    before = algorithm.init_server(ctx)

    one = algorithm.aggregate(before, iter(sent), ctx)
    other = algorithm.aggregate(before, reversed(sent), ctx)

    assert all(torch.equal(one[key], other[key]) for key in one)


def test_without_uploads_the_server_stays_as_it_is(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed")
    server = algorithm.init_server(ctx)

    assert algorithm.aggregate(server, [], ctx) is server


# --- rounds ---


@pytest.mark.parametrize("rounds", [1, 3])
def test_with_a_flat_prior_and_no_matching_it_is_fedavg(make_ctx, make_algorithm, run_rounds, rounds):
    # every client has as much of every class
    ctx = make_ctx("bnfed", clients=3, labels_per_client=10, lr=0.1, weighting="uniform")
    algorithm = make_algorithm("bnfed", begin="common", sweeps=0, sigma0=1e12, round_decay=1.0)

    matched = run_rounds(algorithm, ctx, rounds).server
    averaged = run_rounds(make_algorithm("fedavg"), ctx, rounds).server["w"]

    torch.testing.assert_close(pack(matched["neurons"], matched["bias"]), averaged, rtol=1e-5, atol=1e-6)


def test_near_networks_are_matched_neuron_by_neuron(make_ctx, make_algorithm, run_rounds):
    """So that the sweeps leave FedAvg's identity alone where clients begin alike and learn little."""
    ctx = make_ctx("bnfed", clients=3, labels_per_client=10, lr=0.01)

    server = run_rounds(make_algorithm("bnfed", begin="common", sigma=0.01), ctx).server

    assert len(server["neurons"]) == WIDTH
    assert torch.equal(server["assignment"], server["assignment"][:1].repeat(3, 1))


def test_a_client_trains_its_part_and_says_how_much_of_each_class_it_has(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed", client=1, lr=0.1)
    data = ctx.task.train_data(1)

    message, memory = make_algorithm("bnfed").update({"w": ctx.task.initial}, {}, data, ctx)
    plain, _ = make_algorithm("fedavg").update({"w": ctx.task.initial}, {}, data, ctx)

    assert torch.equal(message["w"], plain["w"])
    assert message["classes"].tolist() == [(data.y == c).sum().item() for c in range(10)]
    assert memory == {}


def test_the_rate_decays_with_every_round(small, make_algorithm, quadratic):
    quadratic(1.0, 0.0)
    ctx = at_round(small(lr=0.5), 3).at(0)
    w = torch.ones_like(ctx.task.initial)

    message, _ = make_algorithm("bnfed", round_decay=0.8).update({"w": w}, {}, ctx.task.train_data(0), ctx)

    # one step of 0.5 * 0.8^2 = 0.32 towards 0
    torch.testing.assert_close(message["w"], torch.full_like(w, 0.68))


def test_everyone_begins_with_a_network_of_its_own(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed", clients=3)
    algorithm = make_algorithm("bnfed")
    server = algorithm.init_server(ctx)

    starts = [algorithm.download(server, ctx.at(client))["w"] for client in range(3)]

    assert torch.equal(algorithm.download(server, ctx.at(0))["w"], starts[0])
    for i, start in enumerate(starts):
        assert not torch.equal(start, ctx.task.initial)
        assert all(not torch.equal(start, other) for other in starts[:i])
        # drawn as the common one is: U(-1/8, 1/8) on 64 pixels
        assert start[: 64 * WIDTH].abs().max().item() == pytest.approx(0.125, rel=0.01)


def test_everyone_can_begin_with_the_common_network(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed", clients=3)
    algorithm = make_algorithm("bnfed", begin="common")
    server = algorithm.init_server(ctx)

    for client in range(3):
        assert torch.equal(algorithm.download(server, ctx.at(client))["w"], ctx.task.initial)


def test_a_client_gets_the_neurons_it_was_matched_to_in_its_own_order(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed", sigma0=1e8)
    w = network(distinct(1, 2, 3, 4, 5), bias=(1.0, 2.0))
    reverse = network(distinct(1, 2, 3, 4, 5).flip(0), bias=(1.0, 2.0))

    server = algorithm.aggregate(algorithm.init_server(ctx), [upload(0, w), upload(1, reverse)], ctx)

    torch.testing.assert_close(algorithm.download(server, ctx.at(0))["w"], w)
    torch.testing.assert_close(algorithm.download(server, ctx.at(1))["w"], reverse)


def test_a_matching_begins_with_the_one_before(small, make_algorithm):
    ctx = small()
    algorithm = make_algorithm("bnfed", sweeps=0)
    sent = [upload(client, network(distinct(1, 2, 3, 4, 5))) for client in range(2)]
    before = algorithm.aggregate(algorithm.init_server(ctx), sent, ctx)

    # client 1 turns its neurons round; without sweeps nobody looks
    turned = [sent[0], upload(1, network(distinct(1, 2, 3, 4, 5).flip(0)))]
    after = algorithm.aggregate(before, turned, at_round(ctx, 2))
    mended = make_algorithm("bnfed", sweeps=1).aggregate(before, turned, at_round(ctx, 2))

    assert torch.equal(after["assignment"], before["assignment"])
    assert torch.equal(mended["assignment"][0], mended["assignment"][1].flip(0))


def test_who_did_not_report_gets_the_neurons_that_most_clients_use(small, make_algorithm):
    ctx = small(clients=3)
    algorithm = make_algorithm("bnfed")
    first, second = distinct(1, 0, 0, 0, 0), distinct(-900, 0, 0, 0, 0)
    everyone = [upload(0, network(first)), upload(1, network(second)), upload(2, network(first))]
    before = algorithm.aggregate(algorithm.init_server(ctx), everyone, ctx)

    server = algorithm.aggregate(before, everyone[:2], at_round(ctx, 2))

    assert server["assignment"][2].tolist() == [-1] * WIDTH
    assert len(server["counts"]) == 101
    used = neurons_of(server, ctx.at(2))
    # the 99 that both have, then the first of the two that are one client's
    assert len(set(used.tolist())) == WIDTH
    assert server["counts"][used].tolist() == [2] * 99 + [1]
    expected = pack(server["neurons"][used], server["bias"])
    assert torch.equal(algorithm.download(server, ctx.at(2))["w"], expected)


def test_who_comes_back_is_matched_from_what_it_was_sent(small, make_algorithm):
    ctx = small(clients=3)
    algorithm = make_algorithm("bnfed", sweeps=0)
    sent = [upload(client, network(distinct(1, 2, 3, 4, 5))) for client in range(2)]
    before = algorithm.aggregate(algorithm.init_server(ctx), sent, ctx)
    used = neurons_of(before, ctx.at(2))

    server = algorithm.aggregate(before, [sent[0], upload(2, pack(*random_network(0)))], at_round(ctx, 2))

    # its neuron l went where the other's neuron with the same number before went
    of_other = before["assignment"][0].tolist()
    assert server["assignment"][2].tolist() == [server["assignment"][0, of_other.index(i)] for i in used.tolist()]


def test_sending_all_of_the_global_network_only_costs_more(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("bnfed", clients=3, lr=0.1)
    options = {"sigma": 0.01}  # more global neurons than a client has

    part = run_rounds(make_algorithm("bnfed", **options), ctx, 3).server
    whole = run_rounds(make_algorithm("bnfed", send="global", **options), ctx, 3).server

    assert all(torch.equal(part[key], whole[key]) for key in part)
    width = len(part["neurons"])
    assert width > WIDTH
    now = at_round(ctx, 4).at(0)
    scalars = [
        sum(value.numel() for value in make_algorithm("bnfed", send=send).download(part, now).values())
        for send in ("matched", "global")
    ]
    # d, or L (D + 1 + C) + C and the client's 100 numbers
    assert scalars == [7_510, width * 75 + 10 + 100]


@pytest.mark.parametrize("max_width", [100, 110])
def test_the_network_does_not_outgrow_its_largest_width(make_ctx, make_algorithm, run_rounds, max_width):
    ctx = make_ctx("bnfed", clients=4, lr=0.1)

    def width(**options):
        return len(run_rounds(make_algorithm("bnfed", sigma=0.02, **options), ctx, 2).server["neurons"])

    assert width() > 110
    assert width(max_width=max_width) == max_width


def test_adaptation_goes_on_from_the_clients_part(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("bnfed", clients=3, lr=0.1, client=1)
    algorithm = make_algorithm("bnfed", sigma=0.02)
    server = run_rounds(algorithm, ctx).server
    part, data = algorithm.download(server, ctx)["w"], ctx.task.train_data(1)

    adapted = [algorithm.personal_model(server, {}, data, ctx, epochs) for epochs in (0, 2)]

    assert len(server["neurons"]) > WIDTH
    assert torch.equal(adapted[0]["w"], part)
    assert torch.equal(adapted[1]["w"], fine_tune(part, data, ctx, 2))
    assert not torch.equal(adapted[1]["w"], part)
    assert algorithm.describe(adapted[1], ctx) == {}


def test_without_adaptation_there_is_only_a_global_model(make_ctx, make_algorithm):
    ctx = make_ctx("bnfed", client=0)
    algorithm = make_algorithm("bnfed")
    server, data = algorithm.init_server(ctx), ctx.task.train_data(0)

    assert algorithm.personal_model(server, {}, data, ctx, None) is None
    assert algorithm.global_model(server, {}, data, ctx) is server


def test_a_newcomer_adapts_the_most_used_neurons(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("bnfed", clients=4, newcomers=1, lr=0.1)
    algorithm = make_algorithm("bnfed", sigma=0.02)
    server = run_rounds(algorithm, ctx).server
    assert ctx.task.newcomers == (0,)

    model = algorithm.personal_model(server, {}, ctx.task.train_data(0), ctx.at(0), 0)

    most = server["counts"].sort(descending=True, stable=True).indices[:WIDTH]
    assert torch.equal(model["w"], pack(server["neurons"][most], server["bias"]))


# --- options ---


@pytest.mark.parametrize(
    "option",
    [
        {"gamma": 50.0},
        {"sigma": 1.0},
        {"sigma0": 10.0},
        {"mu0": 0.05},
        {"mu0_bias": 0.0},
        {"sweeps": 0},
        {"max_width": 105},
        {"count_cap": 1},
        {"count_weight": 8.0},
        {"begin": "common"},
        {"round_decay": 0.5},
    ],
    ids=str,
)
def test_every_option_changes_the_global_network(make_ctx, make_algorithm, run_rounds, option):
    ctx = make_ctx("bnfed", clients=4, lr=0.1)
    base = {"sigma": 0.02, "sweeps": 1}

    usual = run_rounds(make_algorithm("bnfed", **base), ctx, 2).server
    other = run_rounds(make_algorithm("bnfed", **{**base, **option}), ctx, 2).server

    assert not torch.equal(other["neurons"], usual["neurons"])


@pytest.mark.parametrize(
    "option",
    [
        {"gamma": 0.0},
        {"sigma": 0.0},
        {"sigma0": -1.0},
        {"sweeps": -1},
        {"max_width": 0},
        {"count_cap": 0},
        {"count_weight": -1.0},
        {"begin": "none"},
        {"round_decay": 0.0},
        {"round_decay": 1.1},
        {"send": "nothing"},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(make_algorithm, option):
    with pytest.raises(ValidationError):
        make_algorithm("bnfed", **option)


@pytest.mark.parametrize("model", ["logreg", "mlp2", "mlp_fedrep"])
def test_only_networks_with_one_hidden_layer_can_be_matched(make_ctx, make_algorithm, model):
    with pytest.raises(FedbenchError, match=r"exactly one hidden layer.\n.*dnn100 or mlp256, or mlp3072"):
        make_algorithm("bnfed").init_server(make_ctx("bnfed", model=model))


def test_convolutional_networks_are_refused(make_ctx, make_algorithm, pictures):
    with pytest.raises(FedbenchError, match="exactly one hidden layer"):
        make_algorithm("bnfed").init_server(make_ctx("bnfed", dataset=pictures, model="vgg_s"))


def test_a_frozen_head_is_refused(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="train_part=all"):
        make_algorithm("bnfed").init_server(make_ctx("bnfed", train_part="body"))


def test_a_largest_width_below_a_clients_is_refused(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="max_width is 99, but every client has 100 hidden neurons"):
        make_algorithm("bnfed", max_width=99).init_server(make_ctx("bnfed"))


@pytest.mark.parametrize(("model", "width"), [("dnn100", 100), ("mlp256", 256)])
def test_the_width_is_that_of_the_hidden_layer(make_ctx, make_algorithm, model, width):
    server = make_algorithm("bnfed").init_server(make_ctx("bnfed", model=model))

    assert server["neurons"].shape == (width, 64 + 1 + 10)


def test_it_runs_on_colour_pictures(make_ctx, make_algorithm, run_rounds, pictures):
    ctx = make_ctx("bnfed", dataset=pictures, model="mlp3072", lr=0.01)

    server = run_rounds(make_algorithm("bnfed"), ctx).server

    assert server["neurons"].shape[1] == 3072 + 1 + 10


def test_the_sweeps_of_every_round_have_an_order_of_their_own(small, make_algorithm, monkeypatch):
    orders = []
    original = bnfed.match

    def watched(clients, prior, sweeps, rng, start):
        orders.append((start is None, rng.permutation(1000).tolist()))
        return original(clients, prior, sweeps, rng, start)

    monkeypatch.setattr(bnfed, "match", watched)
    ctx, algorithm = small(), make_algorithm("bnfed")
    sent = [upload(client, pack(*random_network(client))) for client in range(2)]
    server = algorithm.init_server(ctx)
    for number in (1, 2, 2):
        server = algorithm.aggregate(server, sent, at_round(ctx, number))

    assert [is_cold for is_cold, _ in orders] == [True, False, False]
    assert orders[0][1] != orders[1][1]
    assert orders[1][1] == orders[2][1]

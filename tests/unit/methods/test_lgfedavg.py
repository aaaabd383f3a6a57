"""LG-FedAvg by hand: last layers are averaged, early ones stay; and when it is FedAvg or local training."""

import pytest
import torch

from fedbench.algorithm import Ctx
from fedbench.errors import FedbenchError
from fedbench.simulation import train_round
from fedbench.wire import on_wire, size_of

D, BODY, HEAD = 7_510, slice(0, 6_500), slice(6_500, 7_510)  # dnn100 on digits


def whole(algorithm, progress, ctx, client):
    """The vector that a client deploys."""
    here, data = ctx.at(client), ctx.task.train_data(client)
    return algorithm.personal_model(progress.server, progress.clients[client], data, here, None)["w"]


# --- one round ---


def test_the_server_averages_heads_and_clients_keep_their_bodies(two_layers, make_algorithm, run_rounds):
    ctx = two_layers("lgfedavg", weighting="uniform")
    ctx.task.split.train[1] = ctx.task.split.train[1][:1]  # client 1 is left with (2, 0) of class 0

    progress = run_rounds(make_algorithm("lgfedavg"), ctx)

    # Client 0 as for FedPer: first half (1.05, 0.9), second half (0.95, 1.1), weights of class 0: 0.975 and -1.025.
    # Client 1: p - 1[y] = (-1/2, 1/2), into a unit of the first half flows -1: its weights have the gradient -(2, 0),
    # its bias -1; the second half has the negative. Units say 2, so the weights of class 0 have the gradient
    # -1/2 * 2 = -1, and its bias -1/2: weights 1 + 0.1 and -1 + 0.1, bias 0.05.
    class_0, class_1, biases = progress.server["shared"].split([100, 100, 2])
    assert class_0[[0, 99]].tolist() == pytest.approx([(0.975 + 1.1) / 2, (-1.025 - 0.9) / 2])
    assert class_1[[0, 99]].tolist() == pytest.approx([-(0.975 + 1.1) / 2, (1.025 + 0.9) / 2])
    assert biases.tolist() == pytest.approx([0.025, -0.025])
    bodies = [progress.clients[client]["own"][[0, 1, 198, 199, 200, 299]].tolist() for client in (0, 1)]
    assert bodies[0] == pytest.approx([1.05, 0.9, 0.95, 1.1, 0.0, 0.0], abs=1e-7)
    assert bodies[1] == pytest.approx([1.2, 1.0, 0.8, 1.0, 0.1, -0.1])


# --- the split ---


@pytest.mark.parametrize(
    ("model", "start", "d"),
    [
        ("dnn100", 307_300, 308_310),  # 3072*100+100; the last of two linear layers
        # 3*64*25+64 + 64*64*25+64 + 1600*120+120; then 120*64+64 + 64*10+10, the last two of three
        ("cnn5", 299_448, 307_842),
        ("lenet", 50_992, 62_006),  # 3*6*25+6 + 6*16*25+16 + 400*120+120
        ("mlp_fedrep", 1_573_376, 1_721_802),  # 3072*512+512; the last three of four
        ("vgg_s", 262_272, 280_074),  # features 245,760 and 128*128+128
        ("vgg_s_single", 245_760, 247_050),  # one linear layer
    ],
)
def test_the_first_linear_layer_and_all_before_it_stay_local(make_ctx, make_algorithm, pictures, model, start, d):
    ctx = make_ctx("lgfedavg", dataset=pictures, model=model)

    parts = make_algorithm("lgfedavg").parts(ctx)

    assert (parts["own"], parts["shared"]) == (slice(0, start), slice(start, d))


def test_the_number_of_shared_layers_can_be_set(make_ctx, make_algorithm, pictures):
    ctx = make_ctx("lgfedavg", dataset=pictures, model="cnn5")

    starts = [make_algorithm("lgfedavg", shared_layers=layers).shared(ctx.task.net).start for layers in (1, 2, 3)]

    # 64*10+10 = 650 from the end; 120*64+64 = 7,744 more; 1600*120+120 = 192,120 more
    assert starts == [307_192, 299_448, 107_328]


def test_more_shared_layers_than_there_are_is_an_error(make_ctx, make_algorithm):
    ctx = make_ctx("lgfedavg")

    with pytest.raises(FedbenchError, match="shared_layers is 3, but the network has 2 linear layers"):
        make_algorithm("lgfedavg", shared_layers=3).init_server(ctx)


@pytest.mark.parametrize("settings", [{"train_part": "body"}, {"model": "logreg"}], ids=["frozen head", "one layer"])
def test_without_a_layer_to_keep_or_one_to_share_it_is_an_error(make_ctx, make_algorithm, settings):
    ctx = make_ctx("lgfedavg", **settings)

    with pytest.raises(FedbenchError, match="needs early layers to keep and a last one to share"):
        make_algorithm("lgfedavg").init_server(ctx)


# --- what travels ---


def test_the_body_never_travels(make_ctx, make_algorithm):
    ctx = make_ctx("lgfedavg", client=0)
    algorithm = make_algorithm("lgfedavg")
    down = algorithm.download(algorithm.init_server(ctx), ctx)

    up, memory = algorithm.update(down, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    # digits: 4 * (100*10 + 10) bytes both ways; 64*100 + 100 numbers stay
    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4_040
    assert memory["own"].numel() == 6_500


def test_a_client_really_trains_from_the_downloaded_head(make_ctx, make_algorithm):
    ctx = make_ctx("lgfedavg", client=0, lr=1e-30)  # steps too small to change anything
    algorithm = make_algorithm("lgfedavg")
    down = {"shared": torch.linspace(-1, 1, 1_010)}

    message, memory = algorithm.update(down, algorithm.init_client(ctx), ctx.task.train_data(0), ctx)

    assert torch.equal(message["shared"], down["shared"])
    assert torch.equal(memory["own"], ctx.task.initial[BODY])


def test_after_a_round_clients_have_one_head_and_different_bodies(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("lgfedavg", lr=0.1)
    algorithm = make_algorithm("lgfedavg")
    progress = run_rounds(algorithm, ctx)

    one, other = (whole(algorithm, progress, ctx, client) for client in (0, 1))

    assert torch.equal(one[HEAD], other[HEAD])
    assert not torch.equal(one[BODY], other[BODY])


# --- special cases ---


def test_with_all_layers_shared_it_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("lgfedavg", clients=4, f=0.5, lr=0.1, momentum=0.9, tau=2, batch_size=10)

    shared = run_rounds(make_algorithm("lgfedavg", shared_layers=2), ctx, rounds=3).server
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    assert torch.equal(shared["shared"], fedavg["w"])


SETTINGS = {
    "plain": {},
    "persistent momentum": {"momentum": 0.9, "optim_state": "persistent"},
    "persistent adam": {"optimizer": "adam", "lr": 0.003, "optim_state": "persistent"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_as_in_the_code_it_is_local_training_bit_for_bit(make_ctx, make_algorithm, run_rounds, settings):
    ctx = make_ctx("lgfedavg", clients=3, batch_size=10, tau=2, rounds=3, **{"lr": 0.1, **settings})
    algorithm = make_algorithm("lgfedavg", mode="code")

    progress = run_rounds(algorithm, ctx, rounds=3)
    local = run_rounds(make_algorithm("local", budget="full"), ctx, rounds=3)

    for client in range(3):
        assert torch.equal(whole(algorithm, progress, ctx, client), local.clients[client]["w"])


def test_as_in_the_paper_it_is_not_local_training(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("lgfedavg", clients=3, lr=0.1, rounds=3)
    algorithm = make_algorithm("lgfedavg")

    progress = run_rounds(algorithm, ctx, rounds=3)
    local = run_rounds(make_algorithm("local", budget="full"), ctx, rounds=3)

    deployed = whole(algorithm, progress, ctx, 0)
    assert not torch.equal(deployed[BODY], local.clients[0]["w"][BODY])
    assert not torch.equal(deployed[HEAD], local.clients[0]["w"][HEAD])


def test_as_in_the_code_nothing_travels(make_ctx, make_algorithm, begin_training):
    ctx = make_ctx("lgfedavg")
    algorithm = make_algorithm("lgfedavg", mode="code")

    traffic = train_round(algorithm, begin_training(algorithm, ctx), ctx)

    assert (traffic.bytes_down, traffic.bytes_up) == (0, 0)


# --- newcomers ---


@pytest.mark.parametrize(("mode", "moves", "stays"), [("paper", BODY, HEAD), ("code", HEAD, BODY)])
def test_a_newcomer_learns_the_body_in_the_paper_and_the_last_layer_in_the_code(
    make_ctx, make_algorithm, run_rounds, mode, moves, stays
):
    ctx = make_ctx("lgfedavg", clients=3, newcomers=1, lr=0.1, momentum=0.9)
    algorithm = make_algorithm("lgfedavg", mode=mode)
    progress = run_rounds(algorithm, ctx, rounds=2)
    now = Ctx(ctx.task, ctx.protocol, ctx.seed, 3, 0, novel=True)
    before = whole(algorithm, progress, ctx, 0)

    down = algorithm.download(progress.server, now)
    _, memory = algorithm.update(down, progress.clients[0], ctx.task.train_data(0), now)

    after = algorithm.personal_model(progress.server, memory, ctx.task.train_data(0), now, None)["w"]
    assert torch.equal(after[stays], before[stays])
    assert not torch.equal(after[moves], before[moves])
    # the transferred head is the trained one; in the code nothing is transferred
    assert torch.equal(before[HEAD], ctx.task.initial[HEAD]) == (mode == "code")


# --- the warm-up ---


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_in_its_warm_up_it_is_fedavg_bit_for_bit(make_ctx, make_algorithm, run_rounds, settings):
    ctx = make_ctx("lgfedavg", clients=4, f=0.5, batch_size=10, tau=2, **{"lr": 0.1, **settings})
    algorithm = make_algorithm("lgfedavg", warmup_rounds=3)

    progress = run_rounds(algorithm, ctx, rounds=3)
    fedavg = run_rounds(make_algorithm("fedavg"), ctx, rounds=3).server

    for client in range(4):
        assert torch.equal(whole(algorithm, progress, ctx, client), fedavg["w"])


def test_after_its_warm_up_every_client_starts_from_the_warmed_up_network(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("lgfedavg", clients=4, f=0.5, lr=0.1, seed=3)
    algorithm = make_algorithm("lgfedavg", warmup_rounds=2)
    warm = run_rounds(make_algorithm("fedavg"), ctx, rounds=2).server["w"]

    progress = run_rounds(algorithm, ctx, rounds=3)

    third = Ctx(ctx.task, ctx.protocol, ctx.seed, 3)
    trained = algorithm.select({}, {}, third).train
    for client in range(4):
        deployed = whole(algorithm, progress, ctx, client)
        assert torch.equal(deployed[HEAD], progress.server["shared"])
        assert torch.equal(deployed[BODY], warm[BODY]) == (client not in trained)
    # who trained has done so from there
    down, client = {"shared": warm[HEAD], "own": warm[BODY]}, trained[0]
    _, memory = algorithm.update(down, {}, ctx.task.train_data(client), third.at(client))
    assert torch.equal(memory["own"], progress.clients[client]["own"])


def test_the_body_travels_in_the_warm_up_and_once_more_to_every_client(make_ctx, make_algorithm, begin_training):
    ctx = make_ctx("lgfedavg", clients=4, f=0.5, rounds=9)
    algorithm = make_algorithm("lgfedavg", warmup_rounds=2)
    progress, has_own = begin_training(algorithm, ctx), set()

    for number in range(1, 10):
        now = Ctx(ctx.task, ctx.protocol, ctx.seed, number)
        cohort = set(algorithm.select({}, {}, now).train)
        traffic = train_round(algorithm, progress, now)

        # two clients with 1,010 numbers of the head each, and 6,500 of the body where it travels
        if number <= 2:
            expected = 2 * D, 2 * D
        else:
            expected = 2 * 1_010 + 6_500 * len(cohort - has_own), 2 * 1_010
            has_own |= cohort
        assert (traffic.bytes_down, traffic.bytes_up) == (4 * expected[0], 4 * expected[1])
    assert has_own == {0, 1, 2, 3}


def test_a_newcomer_starts_from_the_warmed_up_body(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("lgfedavg", clients=3, newcomers=1, lr=0.1)
    algorithm = make_algorithm("lgfedavg", warmup_rounds=1)
    warm = run_rounds(make_algorithm("fedavg"), ctx, rounds=1).server["w"]

    progress = run_rounds(algorithm, ctx, rounds=2)

    assert torch.equal(whole(algorithm, progress, ctx, 0)[BODY], warm[BODY])


def test_a_newcomer_goes_on_from_its_own_body_and_not_from_the_warmed_up_one(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("lgfedavg", clients=3, newcomers=1, lr=0.1)
    algorithm, data = make_algorithm("lgfedavg", warmup_rounds=1), ctx.task.train_data(0)
    server = run_rounds(algorithm, ctx, rounds=2).server
    now = Ctx(ctx.task, ctx.protocol, ctx.seed, 3, 0, novel=True)
    down, own = algorithm.download(server, now), torch.linspace(-0.2, 0.2, 6_500)

    _, memory = algorithm.update(down, {"own": own}, data, now)
    _, expected = algorithm.update({"shared": server["shared"]}, {"own": own}, data, now)

    assert torch.equal(memory["own"], expected["own"])


def test_the_code_has_no_warm_up(make_job):
    with pytest.raises(FedbenchError, match="warmup_rounds needs mode paper"):
        make_job("lgfedavg", mode="code", warmup_rounds=5)

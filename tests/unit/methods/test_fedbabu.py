"""FedBABU: FedAvg on the body with a head that is drawn once; clients then fine-tune both."""

import pytest
import torch

from fedbench.simulation import Surroundings, simulate


def test_it_trains_the_body_with_equal_weights_unless_told_otherwise(make_job):
    job = make_job("fedbabu")

    assert (job.task.train_part, job.protocol.weighting) == ("body", "uniform")


# --- the head stays ---


def test_the_server_has_the_body_only(make_ctx, make_algorithm):
    server = make_algorithm("fedbabu").init_server(make_ctx("fedbabu"))

    # dnn100 on digits: 64*100 + 100; the head's 100*10 + 10 are not there
    assert {key: value.shape for key, value in server.items()} == {"w": (6_500,)}


def test_only_the_body_travels(make_job, recorder, tmp_path):
    simulate(make_job("fedbabu", rounds=2), recorder, Surroundings(tmp_path))

    # 6,500 numbers of 4 bytes, to and from two clients
    assert recorder.traffic() == [(2 * 26_000, 2 * 26_000)] * 2


def test_training_does_not_move_the_head(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedbabu", lr=0.5, momentum=0.9, weight_decay=0.1, tau=3)
    net = ctx.task.net
    before = net.flat.clone()

    server = run_rounds(make_algorithm("fedbabu"), ctx, rounds=3).server

    assert torch.equal(net.flat[net.head], before[net.head])
    assert not torch.equal(server["w"], before[net.body])


def test_the_head_is_drawn_from_the_seed_and_common_to_all(make_ctx):
    def head(**settings):
        net = make_ctx(**settings).task.net
        return net.flat[net.head].clone()

    assert torch.equal(head(method="fedbabu", seed=3), head(method="fedavg", seed=3))
    assert not torch.equal(head(method="fedbabu", seed=3), head(method="fedbabu", seed=4))


def test_the_body_learns_through_the_frozen_head(make_ctx, make_algorithm):
    # one step from the same start: the body of FedAvg moves alike, because a head's step does not reach it at once
    frozen, free = make_ctx("fedbabu", client=0, lr=0.1, batch_size=25), make_ctx(client=0, lr=0.1, batch_size=25)
    data = frozen.task.train_data(0)

    body, _ = make_algorithm("fedbabu").update({"w": frozen.task.initial}, {}, data, frozen)
    whole, _ = make_algorithm("fedavg").update({"w": free.task.initial}, {}, data, free)

    assert torch.equal(body["w"], whole["w"][:6_500])


# --- special cases ---


def test_with_train_part_all_it_is_fedavg_with_equal_weights_bit_for_bit(make_job, new_recorder, tmp_path):
    babu, average = new_recorder(), new_recorder()
    settings = {"clients": 4, "f": 0.5, "rounds": 3, "lr": 0.1, "tau": 2, "adapt_epochs": [0, 2], "rule": "best_all"}

    simulate(make_job("fedbabu", **settings, train_part="all"), babu, Surroundings(tmp_path / "babu"))
    simulate(make_job("fedavg", **settings, weighting="uniform"), average, Surroundings(tmp_path / "average"))

    assert babu.evaluations() == average.evaluations()
    assert babu.traffic() == average.traffic()


def test_with_train_part_all_its_server_is_fedavgs_bit_for_bit(make_ctx, make_algorithm, run_rounds):
    settings = {"clients": 4, "f": 0.5, "rounds": 3, "lr": 0.1, "momentum": 0.9, "tau": 2}
    babu = make_ctx("fedbabu", **settings, train_part="all")
    average = make_ctx("fedavg", **settings, weighting="uniform")

    one = run_rounds(make_algorithm("fedbabu"), babu, rounds=3).server
    other = run_rounds(make_algorithm("fedavg"), average, rounds=3).server

    assert torch.equal(one["w"], other["w"])


def test_clients_weigh_the_same_whatever_their_samples(make_ctx, make_algorithm, run_rounds, tiny):
    ctx = make_ctx("fedbabu", lr=0.1, train_part="all", **tiny)
    ctx.task.split.train[1] = ctx.task.split.train[1][:1]  # client 1 is left with (2, 0) of class 0

    server = run_rounds(make_algorithm("fedbabu"), ctx, server={"w": torch.zeros(6)}).server

    # client 0: (0.025, -0.05), biases 0; client 1: -0.1 (-1/2) (2, 0) = (0.1, 0), biases 0.05 and -0.05; halves of both
    assert server["w"].tolist() == pytest.approx([0.0625, -0.025, -0.0625, 0.025, 0.025, -0.025])


# --- personalisation ---


def personal(algorithm, ctx, server, epochs):
    return algorithm.personal_model(server, {}, ctx.task.train_data(ctx.client), ctx, epochs)


def test_personalisation_moves_body_and_head(make_ctx, make_algorithm):
    ctx = make_ctx("fedbabu", client=0, lr=0.1)
    net, algorithm = ctx.task.net, make_algorithm("fedbabu")
    before = net.flat.clone()

    found = personal(algorithm, ctx, algorithm.init_server(ctx), 5)

    assert found["w"].shape == (7_510,)
    assert not torch.equal(found["w"][net.body], before[net.body])
    assert not torch.equal(found["w"][net.head], before[net.head])


def test_personalisation_of_the_head_moves_the_head_only(make_ctx, make_algorithm):
    ctx = make_ctx("fedbabu", client=0, lr=0.1, adapt_part="head")
    net, algorithm = ctx.task.net, make_algorithm("fedbabu")
    before = net.flat.clone()

    found = personal(algorithm, ctx, algorithm.init_server(ctx), 5)

    assert torch.equal(found["w"][net.body], before[net.body])
    assert not torch.equal(found["w"][net.head], before[net.head])


def test_no_epochs_leave_the_global_model_with_its_frozen_head(make_ctx, make_algorithm):
    ctx = make_ctx("fedbabu", client=0, lr=0.1)
    net, algorithm = ctx.task.net, make_algorithm("fedbabu")
    head = net.flat[net.head].clone()
    body = torch.randn(6_500, generator=torch.Generator().manual_seed(0))

    found = personal(algorithm, ctx, {"w": body}, 0)

    assert torch.equal(found["w"], torch.cat([body, head]))


def test_there_are_no_personal_models_while_it_trains(make_ctx, make_algorithm):
    ctx = make_ctx("fedbabu", client=0)
    algorithm = make_algorithm("fedbabu")

    assert personal(algorithm, ctx, algorithm.init_server(ctx), None) is None


def test_personalisation_pays(make_job, recorder, tmp_path):
    simulate(make_job("fedbabu", clients=4, rounds=3, lr=0.1, adapt_epochs=[0, 20]), recorder, Surroundings(tmp_path))

    before, after = (e.metrics[None]["accuracy"] for e in recorder.evaluations(stage="adapt"))
    (initial,) = recorder.evaluations(stage="final", view="gm")
    assert before == initial.metrics[None]["accuracy"]
    assert after > before + 0.2


@pytest.fixture
def restless(make_job):
    """A job whose curve goes up and down: its best round is not its last."""

    def make(**settings):
        return make_job("fedbabu", clients=4, lr=3.0, rounds=5, rule="best_all", headline="macro", **settings)

    return make


def test_personalisation_starts_from_the_best_checkpoint_if_the_protocol_says_so(restless, recorder, tmp_path):
    simulate(restless(adapt_epochs=[0], adapt_from="best"), recorder, Surroundings(tmp_path))

    curve = recorder.curve("gm", "macro")
    (best,) = recorder.evaluations(stage="best", view="gm")
    (adapted,) = recorder.evaluations(stage="adapt")
    assert curve[best.round] == max(curve.values()) > curve[5]
    assert adapted.round == best.round
    for client in (None, 0, 1, 2, 3):
        assert adapted.metrics[client]["accuracy"] == best.metrics[client]["accuracy"]


def test_personalisation_starts_from_the_final_state_otherwise(restless, recorder, tmp_path):
    simulate(restless(adapt_epochs=[0]), recorder, Surroundings(tmp_path))

    (final,) = recorder.evaluations(stage="final", view="gm")
    (best,) = recorder.evaluations(stage="best", view="gm")
    (adapted,) = recorder.evaluations(stage="adapt")
    assert adapted.round == 5 != best.round
    assert adapted.metrics[None]["accuracy"] == final.metrics[None]["accuracy"]


def test_a_resumed_run_personalises_the_best_checkpoint_of_before(restless, new_recorder, tmp_path):
    job = restless(adapt_epochs=[2], adapt_from="best")
    whole, halved = new_recorder(), new_recorder()
    simulate(job, whole, Surroundings(tmp_path / "whole"))
    (best,) = whole.evaluations(stage="best", view="gm")

    simulate(job, halved, Surroundings(tmp_path / "halved", should_stop=lambda: halved.last_round() >= best.round + 1))
    simulate(job, halved, Surroundings(tmp_path / "halved"))

    assert halved.rewinds == [0, best.round + 1]
    assert halved.evaluations() == whole.evaluations()

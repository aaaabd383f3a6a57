"""Ensemble: trained as Preset; that all networks vote, by hand; and that one of them is FedBABU."""

import pytest
import torch

from fedbench.evaluation import Standing
from fedbench.training import fine_tune
from fedbench.wire import on_wire, size_of


def test_it_trains_as_preset_does_bit_for_bit(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedhb_ensemble", round_=0, clients=6, f=0.5, labels_per_client=3)

    one, other = (run_rounds(make_algorithm(name, K=3), ctx, rounds=3) for name in ("fedhb_ensemble", "fedhb_preset"))

    assert torch.equal(one.server["w"], other.server["w"])
    assert torch.equal(one.server["assigned"], other.server["assigned"])


def test_probabilities_are_averaged_and_not_logits(make_ctx, make_algorithm, tiny):
    ctx = make_ctx("fedhb_ensemble", **tiny)
    # biases alone: the first network has logits (ln 3, 0), the second (0, ln 9), whatever the image
    networks = torch.zeros(2, 6)
    networks[0, 4], networks[1, 5] = torch.tensor(3.0).log(), torch.tensor(9.0).log()

    found = make_algorithm("fedhb_ensemble").predict({"w": networks}, ctx.task.test_data(0).x, ctx, "mean")

    # (3/4, 1/4) and (1/10, 9/10); of mean logits it would be the softmax of (ln 3 / 2, ln 3): (0.366, 0.634)
    assert found.tolist() == [pytest.approx([0.425, 0.575])] * 2


@pytest.mark.parametrize("train_part", ["body", "all"])
def test_one_network_is_fedbabu_bit_for_bit(make_ctx, make_algorithm, run_rounds, train_part):
    ctx = make_ctx("fedhb_ensemble", round_=0, clients=4, f=0.5, tau=2, train_part=train_part)
    ensemble, fedbabu = make_algorithm("fedhb_ensemble", K=1), make_algorithm("fedbabu")

    grouped, plain = run_rounds(ensemble, ctx, rounds=4), run_rounds(fedbabu, ctx, rounds=4)

    assert torch.equal(grouped.server["w"][0], plain.server["w"])
    data, where, x = ctx.task.train_data(2), ctx.at(2), ctx.task.test_data(2).x
    for view in ("global", "personal"):
        one, other = (
            algorithm.predict(
                algorithm.global_model(progress.server, {}, data, where)
                if view == "global"
                else algorithm.personal_model(progress.server, {}, data, where, 1),
                x,
                where,
                "mean",
            )
            for algorithm, progress in ((ensemble, grouped), (fedbabu, plain))
        )
        assert torch.equal(one, other)


def test_everybody_is_scored_by_all_networks_in_one_pass(make_ctx, make_algorithm, begin_training, monkeypatch):
    ctx = make_ctx("fedhb_ensemble", clients=4)
    algorithm = make_algorithm("fedhb_ensemble")
    seen, predict = [], algorithm.predict
    monkeypatch.setattr(algorithm, "predict", lambda model, x, *rest: seen.append(len(x)) or predict(model, x, *rest))
    progress = begin_training(algorithm, ctx)

    found = Standing(algorithm, progress.server, progress.clients, ctx).evaluate("gm", "mean")

    assert seen == [4 * 5 * 25]  # clients, labels, test images of each
    assert not any(name.startswith("in_cluster") for name in found.metrics[None])  # nobody belongs to one network


def test_personalisation_fine_tunes_every_network(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_ensemble", client=1, clients=4)
    algorithm, data = make_algorithm("fedhb_ensemble", K=3), ctx.task.train_data(1)
    server = algorithm.init_server(ctx)

    adapted = algorithm.personal_model(server, {}, data, ctx, 2)

    assert adapted["w"].shape == (3, 7_510)  # with the head, which is trained now
    for network, start in zip(adapted["w"], server["w"], strict=True):
        assert torch.equal(network, fine_tune(start, data, ctx, 2))
    assert algorithm.personal_model(server, {}, data, ctx, None) is None


def test_in_training_only_the_groups_body_travels(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_ensemble", client=0, clients=4)
    algorithm = make_algorithm("fedhb_ensemble", K=4)

    down = algorithm.download(algorithm.init_server(ctx), ctx)
    up, _ = algorithm.update(down, {}, ctx.task.train_data(0), ctx)

    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4 * 6_500

"""Preset: how clients are grouped, that groups train apart, and that one group is FedBABU."""

import pytest
import torch
from pydantic import ValidationError

from fedbench.algorithm import Upload
from fedbench.errors import FedbenchError
from fedbench.training import fine_tune
from fedbench.wire import on_wire, size_of

SMALL = {"labels_per_client": 2}
"""Few images each, so that digits are enough for many clients."""


def grouping(make_ctx, make_algorithm, K=3, **settings):
    ctx = make_ctx("fedhb_preset", round_=0, **{**SMALL, "clients": 11, **settings})
    return make_algorithm("fedhb_preset", K=K).init_server(ctx)["assigned"].tolist()


# --- groups ---


def test_groups_are_equal_up_to_one_client(make_ctx, make_algorithm):
    found = grouping(make_ctx, make_algorithm)

    assert sorted(found.count(group) for group in range(3)) == [3, 4, 4]


def test_groups_are_random_but_the_same_for_the_same_seed_whatever_the_method(make_ctx, make_algorithm):
    found = grouping(make_ctx, make_algorithm)
    ctx = make_ctx("fedhb_ensemble", round_=7, clients=11, lr=0.5, **SMALL)

    assert make_algorithm("fedhb_ensemble", K=3).init_server(ctx)["assigned"].tolist() == found
    assert len({tuple(grouping(make_ctx, make_algorithm, seed=seed)) for seed in range(4)}) == 4
    assert found != [client % 3 for client in range(11)]


def test_members_make_equal_groups_without_the_newcomers_who_are_dealt_after_them(make_ctx, make_algorithm):
    found = grouping(make_ctx, make_algorithm, K=2, newcomers=5)

    newcomers, members = found[:5], found[5:]
    assert [members.count(group) for group in (0, 1)] == [3, 3]
    assert sorted(newcomers.count(group) for group in (0, 1)) == [2, 3]


def test_more_groups_than_clients_are_refused(make_ctx, make_algorithm):
    with pytest.raises(FedbenchError, match="2 clients do not make 3 groups"):
        make_algorithm("fedhb_preset", K=3).init_server(make_ctx("fedhb_preset"))
    assert make_algorithm("fedhb_preset").init_server(make_ctx("fedhb_preset"))["w"].shape == (2, 6_500)


# --- training ---


def test_groups_are_averaged_apart_and_one_without_participants_keeps_its_network(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_preset", clients=4)
    server = {"w": torch.tensor([[5.0], [6.0], [7.0]]), "assigned": torch.tensor([0, 2, 0, 1], dtype=torch.int32)}
    sent = [
        Upload(client, n, {"w": torch.tensor([value])}) for client, n, value in [(0, 1, 1.0), (1, 1, 9.0), (2, 3, 4.0)]
    ]

    merged = make_algorithm("fedhb_preset", K=3).aggregate(server, iter(sent), ctx)

    # uniformly, as FedBABU: (1 + 4) / 2; nobody: 6; client 1 alone
    assert merged["w"].tolist() == [[2.5], [6.0], [9.0]]
    assert torch.equal(merged["assigned"], server["assigned"])


@pytest.mark.parametrize("train_part", ["body", "all"])
def test_one_group_is_fedbabu_bit_for_bit(make_ctx, make_algorithm, run_rounds, train_part):
    ctx = make_ctx("fedhb_preset", round_=0, clients=4, f=0.5, tau=2, train_part=train_part)
    preset, fedbabu = make_algorithm("fedhb_preset", K=1), make_algorithm("fedbabu")

    grouped, plain = run_rounds(preset, ctx, rounds=4), run_rounds(fedbabu, ctx, rounds=4)

    assert torch.equal(grouped.server["w"][0], plain.server["w"])
    data, where = ctx.task.train_data(2), ctx.at(2)
    one, other = (a.personal_model(p.server, {}, data, where, 1) for a, p in ((preset, grouped), (fedbabu, plain)))
    assert torch.equal(one["w"], other["w"])


def test_the_networks_start_apart_with_one_frozen_head(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_preset", round_=0, clients=4)

    server = make_algorithm("fedhb_preset", K=3).init_server(ctx)

    assert torch.equal(server["w"][0], ctx.task.initial)
    assert server["w"].shape == (3, 6_500)  # bodies: 64 * 100 + 100
    # 6,500 coordinates: the correlation of independent draws has a standard error of 0.012
    assert torch.corrcoef(server["w"]).triu(1).abs().max() < 0.05


def test_a_group_trains_as_if_it_were_alone(make_ctx, make_algorithm, run_rounds):
    ctx = make_ctx("fedhb_preset", round_=0, clients=4, tau=2)
    preset, fedbabu = make_algorithm("fedhb_preset"), make_algorithm("fedbabu")
    start = preset.init_server(ctx)

    together = run_rounds(preset, ctx, server=start).server

    for group in (0, 1):
        members = [client for client in range(4) if start["assigned"][client] == group]
        down = {"w": start["w"][group]}
        now = make_ctx("fedhb_preset", clients=4, tau=2)
        sent = [Upload(c, 25, fedbabu.update(down, {}, now.task.train_data(c), now.at(c))[0]) for c in members]
        assert torch.equal(together["w"][group], fedbabu.aggregate(down, sent, now)["w"])


# --- what is scored and sent ---


def test_a_client_uses_and_fine_tunes_the_network_of_its_group(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_preset", clients=2)
    algorithm = make_algorithm("fedhb_preset")
    server = algorithm.init_server(ctx)

    for client in (0, 1):
        group, where, data = int(server["assigned"][client]), ctx.at(client), ctx.task.train_data(client)
        model = algorithm.global_model(server, {}, data, where)
        adapted = algorithm.personal_model(server, {}, data, where, 2)
        assert torch.equal(model["w"], server["w"][group])
        assert torch.equal(adapted["w"], fine_tune(server["w"][group], data, where, 2))
        assert algorithm.describe(model, ctx) == {f"in_cluster_{k}": float(k == group) for k in (0, 1)}
    assert sorted(server["assigned"].tolist()) == [0, 1]


def test_only_the_groups_body_travels(make_ctx, make_algorithm):
    ctx = make_ctx("fedhb_preset", client=0, clients=4)
    algorithm = make_algorithm("fedhb_preset", K=4)

    down = algorithm.download(algorithm.init_server(ctx), ctx)
    up, _ = algorithm.update(down, {}, ctx.task.train_data(0), ctx)

    assert size_of(on_wire(down)) == size_of(on_wire(up)) == 4 * 6_500


@pytest.mark.parametrize("params", [{"K": 0}, {"k": 2}])
def test_bad_values_are_refused(make_algorithm, params):
    with pytest.raises(ValidationError):
        make_algorithm("fedhb_preset", **params)

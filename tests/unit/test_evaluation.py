"""Which rounds are evaluated, and how every client's model meets its test data."""

import pytest
import torch

from fedbench.algorithm import Algorithm, Params
from fedbench.evaluation import Standing
from fedbench.job import Protocol
from fedbench.memory import ClientStore
from fedbench.schedule import in_window, is_evaluated


def scheduled(**protocol):
    rule = Protocol(**protocol)
    return [round_ for round_ in range(1, rule.rounds + 1) if is_evaluated(round_, rule)]


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ({"rule": "final", "rounds": 25}, [10, 20, 25]),
        ({"rule": "final", "rounds": 20}, [10, 20]),
        ({"rule": "best_all", "rounds": 5}, [1, 2, 3, 4, 5]),
        ({"rule": "mean_last10", "rounds": 25}, [10, *range(16, 26)]),
        ({"rule": "mean_last10", "rounds": 4}, [1, 2, 3, 4]),
        ({"rule": "best_last100", "rounds": 130, "eval_every": 15}, [15, 30, *range(31, 131)]),
        ({"rule": "best_last100", "rounds": 3}, [1, 2, 3]),
        ({"rule": "best_ckpt", "rounds": 25}, [10, 20, 25]),
    ],
)
def test_the_schedule_and_the_window_of_the_rule_decide_which_rounds_are_evaluated(protocol, expected):
    assert scheduled(**{"eval_every": 10, **protocol}) == expected


@pytest.mark.parametrize(
    ("rule", "first"), [("final", 200), ("mean_last10", 191), ("best_last100", 101), ("best_all", 1)]
)
def test_a_rule_looks_at_its_last_rounds_only(rule, first):
    assert [round_ for round_ in range(1, 201) if in_window(round_, rule, 200)] == list(range(first, 201))


class Oracle(Algorithm):
    """Knows the labels of `numbers`: right with confidence 0.91 for labels below the model's `right`, else wrong."""

    title = "Oracle"

    def __init__(self, personal=None):
        super().__init__(Params())
        self.personal = personal or {}
        self.calls = []

    def personal_model(self, server, memory, data, ctx, epochs):
        return self.personal.get(ctx.client)

    def predict(self, model, x, ctx, mode):
        self.calls.append((ctx.client, len(x), mode))
        label = x.flatten().long()
        guess = torch.where(label < model["right"], label, (label + 1) % 10)
        return torch.nn.functional.one_hot(guess, 10) * 0.9 + 0.01


def right(count):
    return {"right": torch.tensor(count)}


@pytest.fixture
def ctx(make_ctx, numbers):
    """Four clients, with 2 test images of each of labels 0-4 (clients 0, 2) or 5-9 (clients 1, 3)."""
    return make_ctx(dataset=numbers, normalize="none", model="logreg", clients=4)


def score(algorithm, server, ctx, view, mode="mean", **options):
    return Standing(algorithm, server, ClientStore(lambda client: {}), ctx).evaluate(view, mode, **options)


def test_a_global_model_is_scored_on_the_test_data_of_every_client(ctx):
    evaluation = score(Oracle(), right(7), ctx, "gm", per_client=True)

    # labels 0-6 are right: all of 0-4 and two fifths of 5-9
    accuracies = {client: metrics["accuracy"] for client, metrics in evaluation.metrics.items()}
    assert accuracies == pytest.approx({None: 0.7, 0: 1.0, 1: 0.4, 2: 1.0, 3: 0.4})


def test_a_personal_model_is_scored_on_the_test_data_of_its_client(ctx):
    algorithm = Oracle(personal={0: right(1), 1: right(10), 2: right(3), 3: right(5)})

    evaluation = score(algorithm, {}, ctx, "pm", per_client=True)

    # of labels 0-4: 1/5 and 3/5; of labels 5-9: all and none
    accuracies = {client: metrics["accuracy"] for client, metrics in evaluation.metrics.items()}
    assert accuracies == pytest.approx({None: 0.45, 0: 0.2, 1: 1.0, 2: 0.6, 3: 0.0})


def test_every_metric_is_recorded(ctx):
    evaluation = score(Oracle(), right(10), ctx, "gm")

    # all right with confidence 0.91: gap 0.09 in one bin; -ln 0.91; 0.09^2 + 9 * 0.01^2;
    # -0.91 ln 0.91 - 9 * 0.01 ln 0.01 = 0.085823 + 0.414465
    expected = {
        "accuracy": 1,
        "macro": 1,
        "ece": 0.09,
        "mce": 0.09,
        "nll": 0.094311,
        "brier": 0.009,
        "entropy": 0.500288,
    }
    assert evaluation.metrics[None] == pytest.approx(expected, abs=1e-6)


def test_macro_is_the_mean_over_clients_where_pooled_weighs_samples(ctx):
    ctx.task.split.test[0] = ctx.task.split.test[0][:2]  # client 0 has two test images left, of label 0

    evaluation = score(Oracle(), right(5), ctx, "gm")

    # clients 0 and 2 are all right, clients 1 and 3 all wrong: 12 of 32 samples, 2 of 4 clients
    assert evaluation.metrics[None]["accuracy"] == pytest.approx(12 / 32)
    assert evaluation.metrics[None]["macro"] == pytest.approx(0.5)


def test_a_view_that_the_method_does_not_have_is_not_evaluated(ctx):
    assert score(Oracle(), right(5), ctx, "pm") is None


def test_clients_without_a_model_are_left_out(ctx):
    evaluation = score(Oracle(personal={1: right(10), 2: right(1)}), {}, ctx, "pm", per_client=True)

    # client 1 all right, client 2 one fifth
    assert set(evaluation.metrics) == {None, 1, 2}
    assert evaluation.metrics[None]["accuracy"] == pytest.approx(0.6)
    assert evaluation.metrics[None]["macro"] == pytest.approx(0.6)


def test_clients_that_share_a_model_by_turns_are_each_scored_with_their_own(ctx):
    one, other = right(5), right(10)
    algorithm = Oracle(personal={0: one, 1: other, 2: one, 3: other})

    evaluation = score(algorithm, {}, ctx, "pm", per_client=True)

    assert [evaluation.metrics[client]["accuracy"] for client in range(4)] == [1.0, 1.0, 1.0, 1.0]


def test_a_shared_model_predicts_for_all_clients_in_one_forward_pass(ctx):
    algorithm = Oracle()

    score(algorithm, right(5), ctx, "gm")

    assert algorithm.calls == [(None, 40, "mean")]


def test_personal_models_predict_for_their_clients_with_the_clients_own_noise(ctx):
    algorithm = Oracle(personal={client: right(client) for client in range(4)})

    score(algorithm, {}, ctx, "pm", "mc")

    assert algorithm.calls == [(client, 10, "mc") for client in range(4)]


def test_where_the_batch_matters_clients_are_scored_alone_in_batches_of_128(make_ctx, add_dataset):
    # 260 test images per client: 128 + 128 + 4
    labels = torch.arange(10).repeat(106)
    add_dataset("many", torch.zeros(1060, 3, 32, 32), labels, per_class=(1, 52))
    ctx = make_ctx(dataset="many", model="vgg_s", clients=2)
    algorithm = Oracle()
    algorithm.predict = lambda model, x, ctx, mode: (
        algorithm.calls.append((ctx.client, len(x))) or torch.full((len(x), 10), 0.1)
    )

    score(algorithm, right(5), ctx, "gm")

    assert algorithm.calls == [(client, size) for client in range(2) for size in (128, 128, 4)]


def test_per_client_figures_come_only_when_asked_for(ctx):
    evaluation = score(Oracle(), right(5), ctx, "gm")

    assert set(evaluation.metrics) == set(evaluation.reliability) == {None}


def test_the_reliability_histogram_holds_the_filled_bins(ctx):
    evaluation = score(Oracle(), right(7), ctx, "gm", per_client=True)

    # 40 predictions, all with confidence 0.91, i.e. in bin 9; 28 are right. Client 1: 10, of which 4 are right.
    (pooled,) = evaluation.reliability[None]
    assert pooled == pytest.approx((9, 40, 36.4, 28), rel=1e-5)
    (of_client,) = evaluation.reliability[1]
    assert of_client == pytest.approx((9, 10, 9.1, 4), rel=1e-5)


def test_an_evaluation_says_what_it_is(ctx):
    evaluation = score(Oracle(), right(7), ctx, "gm", "mc", stage="best")

    described = (evaluation.round, evaluation.stage, evaluation.view, evaluation.predict, evaluation.split)
    assert described == (1, "best", "gm", "mc", "test")


def test_evaluation_builds_no_graph_of_gradients(ctx):
    algorithm, seen = Oracle(), []
    algorithm.predict = lambda model, x, ctx, mode: (
        seen.append(torch.is_grad_enabled()) or torch.full((len(x), 10), 0.1)
    )

    score(algorithm, right(5), ctx, "gm")

    assert seen == [False]


def test_what_a_method_says_of_its_models_is_recorded_with_their_scores(ctx):
    class Sparse(Oracle):
        def describe(self, model, ctx):
            return {"kept": model["right"].item() / 10}

    algorithm = Sparse(personal={0: right(1), 1: right(10), 2: right(3), 3: right(6)})

    evaluation = score(algorithm, {}, ctx, "pm", per_client=True)

    # 0.1, 1.0, 0.3 and 0.6: 2.0 / 4 = 0.5 on average
    assert {client: metrics["kept"] for client, metrics in evaluation.metrics.items()} == pytest.approx(
        {None: 0.5, 0: 0.1, 1: 1.0, 2: 0.3, 3: 0.6}
    )


def test_a_test_set_that_clients_share_is_seen_once_and_counts_for_all(ctx):
    apart, together = Oracle(), Oracle()
    ctx.task.split.test[2] = ctx.task.split.test[0].copy()
    expected = score(apart, right(7), ctx, "gm", per_client=True)

    ctx.task.split.test[2] = ctx.task.split.test[0]
    found = score(together, right(7), ctx, "gm", per_client=True)

    assert found.metrics == expected.metrics
    assert found.reliability == expected.reliability
    assert apart.calls == [(None, 40, "mean")]
    assert together.calls == [(None, 30, "mean")]

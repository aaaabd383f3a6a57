"""Metrics from mergeable sums, against worked values and against netcal."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from netcal.metrics import ECE, MCE

from fedbench.metrics import BINS, Tally, confidence_bin


def tally_of(probabilities, y, client=None, clients=1):
    tally = Tally.zeros(clients)
    tally.add(probabilities, y, torch.zeros_like(y) if client is None else client)
    return tally


def metrics_of(probabilities, y):
    return tally_of(probabilities, y).rows()[0]


def two_class(confidences, correct):
    """Probabilities of two classes whose first has the given confidence (above 0.5), and labels that make it right."""
    first = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([first, 1 - first], dim=1), 1 - torch.tensor(correct)


def random_predictions(seed, n=500, classes=5):
    generator = torch.Generator().manual_seed(seed)
    probabilities = torch.randn(n, classes, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    return probabilities, torch.randint(classes, (n,), generator=generator)


def test_ece_is_the_weighted_mean_gap_of_the_worked_example():
    probabilities, y = two_class([0.95, 0.85, 0.75, 0.65], [1, 0, 1, 0])

    # one sample per bin: gaps 0.05, 0.85, 0.25, 0.65, mean 1.8 / 4
    assert metrics_of(probabilities, y)["ece"] == pytest.approx(0.45)


def test_mce_is_the_largest_gap_of_the_worked_example():
    probabilities, y = two_class([0.95, 0.85, 0.75, 0.65], [1, 0, 1, 0])

    # gaps 0.05, 0.85, 0.25, 0.65
    assert metrics_of(probabilities, y)["mce"] == pytest.approx(0.85)


def test_brier_is_the_summed_squared_error_of_the_worked_example():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])

    # (0.09 + 0.04 + 0.01 = 0.14) and (0.01 + 0.49 + 0.36 = 0.86), mean 1.0 / 2; not divided by the classes
    assert metrics_of(probabilities, torch.tensor([0, 1]))["brier"] == pytest.approx(0.5)


def test_accuracy_and_nll_of_the_worked_example():
    probabilities = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]])

    metrics = metrics_of(probabilities, torch.tensor([0, 1]))

    # the first is right, the second is not; -(ln 0.7 + ln 0.3) / 2 = (0.356675 + 1.203973) / 2
    assert metrics["accuracy"] == 0.5
    assert metrics["nll"] == pytest.approx(0.780324, abs=1e-6)


def test_the_last_bin_is_closed_at_one():
    probabilities, y = two_class([0.95, 1.0], [1, 0])

    # both in the last bin: accuracy 0.5, mean confidence 0.975
    assert metrics_of(probabilities, y)["ece"] == pytest.approx(0.475)


def test_bins_are_open_below_and_closed_above():
    confidence = torch.tensor([0.05, 0.1, 0.1000001, 0.3, 0.5, 0.7, 0.9, 0.9000001, 1.0], dtype=torch.float64)

    assert confidence_bin(confidence).tolist() == [0, 0, 1, 2, 4, 6, 8, 9, 9]


def test_bins_hold_count_confidence_and_correct_of_their_samples():
    probabilities, y = two_class([0.95, 0.85, 1.0], [1, 0, 0])

    bins = tally_of(probabilities, y).bins[0]

    assert bins[9] == pytest.approx([2, 1.95, 1])
    assert bins[8] == pytest.approx([1, 0.85, 0])
    assert bins[:8].sum() == 0


def test_nll_is_clipped_at_a_probability_of_1e_minus_12():
    probabilities = torch.tensor([[1.0, 0.0]])

    # -ln 1e-12 = 27.631021
    assert metrics_of(probabilities, torch.tensor([1]))["nll"] == pytest.approx(27.631021, abs=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_ece_and_mce_are_those_of_netcal(seed):
    # netcal's bins are closed below, ours above: the two agree wherever no confidence lies on an edge
    probabilities, y = random_predictions(seed)
    confidence = probabilities.max(-1).values.numpy()
    assert not np.any(np.isclose(confidence * BINS, np.round(confidence * BINS), atol=1e-9))

    metrics = metrics_of(probabilities, y)

    assert metrics["ece"] == pytest.approx(ECE(bins=BINS).measure(probabilities.numpy(), y.numpy()), abs=1e-9)
    assert metrics["mce"] == pytest.approx(MCE(bins=BINS).measure(probabilities.numpy(), y.numpy()), abs=1e-9)


def test_pooling_clients_gives_the_metrics_of_all_samples_at_once():
    probabilities, y = random_predictions(0)
    client = torch.arange(500) % 3

    pooled = tally_of(probabilities, y, client, clients=3).pooled().rows()[0]

    assert pooled == pytest.approx(metrics_of(probabilities, y))


def test_a_clients_row_holds_its_own_samples_only():
    probabilities, y = random_predictions(0)
    client = torch.arange(500) % 3

    rows = tally_of(probabilities, y, client, clients=3).rows()

    for number in range(3):
        assert rows[number] == pytest.approx(metrics_of(probabilities[client == number], y[client == number]))


def test_a_client_without_samples_has_no_metrics():
    probabilities, y = random_predictions(0)

    rows = tally_of(probabilities, y, torch.full_like(y, 2), clients=3).rows()

    assert rows[0] == rows[1] == {}
    assert rows[2] != {}


@given(st.lists(st.integers(0, 500), max_size=4))
def test_adding_in_chunks_is_adding_at_once(cuts):
    probabilities, y = random_predictions(1)
    client = torch.arange(500) % 4
    chunked = Tally.zeros(4)

    for part in np.split(np.arange(500), sorted(cuts)):
        chunked.add(probabilities[part], y[part], client[part])

    whole = tally_of(probabilities, y, client, clients=4)
    for name in ("nll", "brier", "bins"):
        assert getattr(chunked, name) == pytest.approx(getattr(whole, name))


@given(
    st.lists(
        st.tuples(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=3, max_size=3), st.integers(0, 2)),
        min_size=1,
        max_size=20,
    )
)
def test_metrics_of_extreme_logits_stay_finite_and_in_range(samples):
    logits, y = torch.tensor([row for row, _ in samples]), torch.tensor([label for _, label in samples])

    metrics = metrics_of(logits.softmax(-1), y)

    slack = 1e-5  # of float32 sums
    highest = {
        "accuracy": 1.0,
        "nll": 27.6311,
        "brier": 2.0,
        "entropy": 1.0987,
        "ece": 1.0,
        "mce": 1.0,
    }  # ln 3 = 1.0986
    assert metrics.keys() == highest.keys()
    for name, value in metrics.items():
        assert -slack <= value <= highest[name] + slack, name


@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_ece_is_never_above_mce(seed, classes):
    metrics = metrics_of(*random_predictions(seed, n=50, classes=classes))

    assert metrics["ece"] <= metrics["mce"] + 1e-12


def test_perfect_predictions_have_no_error():
    probabilities = torch.eye(3)[[0, 2, 1]]

    metrics = metrics_of(probabilities, torch.tensor([0, 2, 1]))

    assert metrics == {"accuracy": 1.0, "nll": 0.0, "brier": 0.0, "entropy": 0.0, "ece": 0.0, "mce": 0.0}

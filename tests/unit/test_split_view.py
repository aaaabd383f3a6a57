"""`fedbench datasets show`: a split as a table, as a summary, as JSON, and as a bubble plot."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgba
from typer.testing import CliRunner

from fedbench.cli import app
from fedbench.errors import FedbenchError
from fedbench.report.split_view import SplitView, draw, plot_split, view_split
from fedbench.report.styles import COLOURS


@pytest.fixture
def show(tmp_path):
    """Calls the command with these words; pictures go to a folder of the test."""

    def call(*words):
        result = CliRunner().invoke(
            app, ["datasets", "show", *words, "--out", str(tmp_path)], catch_exceptions=False, env={"COLUMNS": "200"}
        )
        assert result.exit_code == 0, result.output
        return result.output

    return call


@pytest.fixture
def view():
    """Three clients and three classes; the last client is a newcomer."""
    return SplitView(
        dataset="made_up",
        partition="shards[s=2]",
        settings={"s": 2, "repeat": True},
        seed=3,
        train=np.array([[40, 0, 10], [0, 20, 20], [0, 30, 0]]),
        test=np.array([[4, 0, 1], [0, 2, 2], [0, 3, 0]]),
        n_test=12,
        newcomers=(2,),
        sha256="0123456789abcdef" * 4,
    )


# --- the numbers ---


def test_the_digits_are_counted_by_client_and_class():
    view = view_split("digits", "labels", 2, size="small")

    # 5 training and 25 test images of each of 5 labels
    assert view.train.tolist() == [[5] * 5 + [0] * 5, [0] * 5 + [5] * 5]
    assert view.test.tolist() == [[25] * 5 + [0] * 5, [0] * 5 + [25] * 5]
    assert view.n_test == 250


def test_settings_are_shown_as_given_and_in_full():
    view = view_split("digits", "labels[labels=shift]", 2, size="medium")

    assert view.partition == "labels[labels=shift,size=medium]"
    assert view.settings == {"size": "medium", "labels_per_client": 5, "labels": "shift", "stratified": True}


def test_a_view_is_of_the_split_that_a_job_sees(make_ctx):
    job_split = make_ctx(clients=10, partition="shards", s=5, seed=4).task.split

    assert view_split("digits", "shards[s=5]", 10, seed=4).sha256 == job_split.sha256()


def test_shared_test_samples_are_counted_once():
    view = view_split("digits", "label_window", 9)

    assert view.n_test == view.test[0].sum()


def test_the_summary_tells_sizes_and_single_classes(view):
    assert view.summary() == {
        "clients": 2,
        "newcomers": 1,
        "train": 120,
        "test": 12,
        "single_class": 1,
        "smallest": {"client": 2, "train": 30},
        "largest": {"client": 0, "train": 50},
        "split": "0123456789abcdef" * 4,
    }


def test_the_summary_is_a_line_with_the_settings_below(view):
    assert view.summary_text().splitlines() == [
        "2 clients and 1 newcomers, 120 training and 12 test samples; 1 with a single class; "
        "smallest 30 (client 2), largest 50 (client 0); split 0123456789abcdef",
        "made_up, shards[s=2], 2 clients, seed 3: s=2, repeat=True",
    ]


# --- the table ---


def test_a_row_has_the_counts_of_a_client(view):
    assert view.rows() == [
        {"client": "0", "train": 50, "test": 5, "classes": 2, "label:train/test": "0:40/4 2:10/1"},
        {"client": "1", "train": 40, "test": 4, "classes": 2, "label:train/test": "1-2:20/2"},
        {"client": "2 (new)", "train": 30, "test": 3, "classes": 1, "label:train/test": "1:30/3"},
    ]


def test_neighbours_with_other_counts_or_a_gap_are_told_apart(view):
    train = np.array([[5, 5, 0, 5, 6, 6]])

    (row,) = replace(view, train=train, test=np.ones_like(train), newcomers=()).rows()

    assert row["label:train/test"] == "0-1:5/1 2:0/1 3:5/1 4-5:6/1"


def test_many_different_counts_become_a_range(view):
    train = np.arange(1, 31)[None]

    (row,) = replace(view, train=train, test=train + 1, newcomers=()).rows()

    assert row["label:train/test"] == "30 labels with 1-30/2-31 each"


# --- the command ---


def test_the_command_prints_a_line_per_client_a_summary_and_the_files(show, tmp_path):
    lines = show("digits", "--partition", "labels[labels=shift]", "--clients", "3", "--size", "small").splitlines()

    name = "split-digits-labels_labels=shift_size=small-3_clients-seed_0"
    assert [line.split() for line in lines[:4]] == [
        ["client", "train", "test", "classes", "label:train/test"],
        ["0", "25", "125", "5", "0-4:5/25"],
        ["1", "25", "125", "5", "1-5:5/25"],
        ["2", "25", "125", "5", "2-6:5/25"],
    ]
    assert lines[4].startswith("3 clients, 75 training and 375 test samples; 0 with a single class; smallest 25 ")
    assert [Path(line).name for line in lines[6:]] == [f"{name}.png", f"{name}.svg"]
    assert all(Path(line).is_file() and Path(line).parent == tmp_path for line in lines[6:])


def test_many_clients_take_a_line_each(show):
    # 100 clients of two shards: 200 shards, 20 per class
    lines = show("synthetic", "--partition", "shards[s=2]", "--clients", "100").splitlines()

    assert len(lines) == 1 + 100 + 2 + 2


def test_the_command_speaks_json(show):
    content = json.loads(show("digits", "--clients", "2", "--seed", "5", "--json"))

    assert content["dataset"] == "digits"
    assert content["settings"]["size"] == "small"
    assert content["seed"] == 5
    assert content["summary"]["train"] == 50
    assert content["clients"][1] == {
        "client": 1,
        "newcomer": False,
        "train": {"5": 5, "6": 5, "7": 5, "8": 5, "9": 5},
        "test": {"5": 25, "6": 25, "7": 25, "8": 25, "9": 25},
    }
    assert [Path(file).suffix for file in content["files"]] == [".png", ".svg"]


def test_pictures_go_beside_the_results_by_default(tmp_path):
    result = CliRunner().invoke(
        app, ["datasets", "show", "digits"], catch_exceptions=False, env={"FEDBENCH_DB": str(tmp_path / "my.sqlite")}
    )

    assert result.exit_code == 0
    assert len(list((tmp_path / "plots").iterdir())) == 2


def test_data_sets_are_still_listed():
    result = CliRunner().invoke(app, ["datasets", "--json"], catch_exceptions=False)

    assert "digits" in {row["dataset"] for row in json.loads(result.output)}


def test_no_torch_is_imported(tmp_path):
    call = f"['datasets', 'show', 'digits', '--partition', 'shards[s=5]', '--out', {str(tmp_path)!r}]"
    code = (
        f"import sys; from fedbench.cli import app; app({call}, standalone_mode=False); print('torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("partition", "size", "message"),
    [
        ("shardz", None, "unknown partition 'shardz'"),
        ("shards[z=5]", None, "the partition shards has no setting 'z'"),
        ("shards[s=0]", None, "wrong setting for the partition shards:\ns: "),
        ("shards", "small", "the partition shards has no setting 'size'"),
        ("labels", "huge", "has no size 'huge'"),
        ("shards[s=3]", None, "not a multiple of the 10 classes"),
    ],
)
def test_mistakes_are_named(partition, size, message):
    with pytest.raises(FedbenchError, match=message):
        view_split("digits", partition, 7, size=size)


# --- the plot ---


def test_every_client_and_class_with_training_samples_has_a_bubble(view):
    (bubbles,) = draw(view).axes[0].collections

    # client, class
    assert bubbles.get_offsets().tolist() == [[0, 0], [0, 2], [1, 1], [1, 2], [2, 1]]


def test_the_area_of_a_bubble_is_the_number_of_samples(view):
    (bubbles,) = draw(view).axes[0].collections

    areas = bubbles.get_sizes()
    assert (areas / areas[0] * 40).tolist() == pytest.approx([40, 10, 20, 20, 30])


def test_newcomers_have_another_colour(view):
    (bubbles,) = draw(view).axes[0].collections

    colours = [tuple(colour) for colour in bubbles.get_facecolors()]
    assert colours == [to_rgba(COLOURS[0])] * 4 + [to_rgba(COLOURS[1])]


def test_the_plot_says_what_it_shows(view):
    figure = draw(view)

    assert figure.get_suptitle() == "made_up, shards[s=2], 2 clients, seed 3"
    assert figure.axes[0].get_ylabel() == "class"
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "$\\mathdefault{10}$",
        "$\\mathdefault{25}$",
        "$\\mathdefault{40}$",
    ]


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (5, 3), (100, 10), (190, 100)])
def test_bubbles_fit_into_their_cells(view, clients, classes):
    train = np.full((clients, classes), 7)
    figure = draw(replace(view, train=train, test=train, newcomers=()))

    figure.draw_without_rendering()  # settles the layout

    panel = figure.axes[0]
    (bubbles,) = panel.collections
    cell = np.diff(panel.transData.transform([(0, 0), (1, 1)]), axis=0) / figure.dpi * 72  # in points
    assert np.sqrt(bubbles.get_sizes().max()) <= cell.min() * 1.02


def test_the_same_view_gives_the_same_files(view, tmp_path):
    once, again = (plot_split(view, tmp_path / name) for name in ("once", "again"))

    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


def test_a_folder_that_cannot_be_made_is_named(view, tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(FedbenchError, match="cannot be written"):
        plot_split(view, tmp_path / "file" / "plots")


def test_numbers_to_predict_are_no_labels_to_show():
    with pytest.raises(FedbenchError, match="quadratics is regression: it has no labels to show"):
        view_split("quadratics", "natural[test_fraction=0,min_size=2]", clients=2)

"""Contact sheets: which image is shown where, with which name, in which colours."""

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from fedbench.cli import app
from fedbench.dataset import Arrays
from fedbench.errors import FedbenchError
from fedbench.report.sheet import Panel, draw_sheet, montage, panels


def labelled(labels, group=None):
    y = np.array(labels)
    return Arrays(np.zeros((len(y), 1, 4, 4), dtype=np.uint8), y, len(y), None if group is None else np.array(group))


# --- which images ---


def test_a_class_has_a_row_with_its_first_ten_images():
    (panel,) = panels(labelled([0, 1] * 12), classes=2)

    assert panel.samples.tolist() == [[*range(0, 20, 2)], [*range(1, 20, 2)]]
    assert panel.rows == ("0", "1")


def test_places_without_an_image_stay_empty():
    (panel,) = panels(labelled([1, 1, 1]), classes=2)

    assert panel.samples.tolist() == [[-1] * 10, [0, 1, 2, *[-1] * 7]]


def test_of_many_classes_each_has_one_image_at_the_place_of_its_number():
    labels = np.random.default_rng(0).permutation(np.tile(np.arange(62), 3))

    (panel,) = panels(labelled(labels), classes=62)

    assert panel.samples.shape == (7, 10)
    for (row, column), sample in np.ndenumerate(panel.samples):
        label = int(panel.rows[row]) + int(panel.columns[column])
        assert sample == (np.flatnonzero(labels == label)[0] if label < 62 else -1)


def test_two_groups_have_a_panel_each():
    first, second = panels(labelled([0, 0, 1, 1], [0, 1, 0, 1]), classes=2, group_names=("this", "that"))

    assert (first.title, second.title) == ("this", "that")
    assert first.samples[:, 0].tolist() == [0, 2]
    assert second.samples[:, 0].tolist() == [1, 3]


def test_groups_without_names_are_numbered():
    assert [panel.title for panel in panels(labelled([0, 0], [0, 3]), classes=1)] == ["group 0", "group 3"]


def test_many_groups_have_a_row_each_with_the_same_classes():
    labels, group = np.tile(np.repeat(np.arange(100), 2), 5), np.repeat(np.arange(5), 200)

    (panel,) = panels(labelled(labels, group), classes=100, group_names=tuple("abcde"))

    assert panel.rows == ("a", "b", "c", "d", "e")
    assert panel.columns == ("0", "11", "22", "33", "44", "55", "66", "77", "88", "99")
    assert panel.samples[0].tolist() == [2 * label for label in range(0, 100, 11)]
    assert (np.diff(panel.samples, axis=0) == 200).all()


# --- how they look ---


def test_images_stand_upright_side_by_side_on_white():
    x = np.zeros((2, 1, 4, 4), dtype=np.uint8)
    x[0, 0, 0, 3] = 16  # top right
    x[1, 0, 3, 0] = 8  # bottom left, half as bright
    panel = Panel("", np.array([[0, 1, -1], [-1, 0, 0]]), ("",) * 2, ("",) * 3, "")

    picture = montage(Arrays(x, np.zeros(2, dtype=np.int64), 2), panel, full_scale=16)

    grey = picture[..., 0]
    assert picture.shape == (10, 15, 3)  # a pixel between images
    assert grey[:4, :4].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert grey[5:9, 5:9].tolist() == grey[:4, :4].tolist()
    assert grey[3, 5] == 0.5
    for white in (grey[:, 4], grey[4], grey[:5, 10:], grey[5:, :5]):
        assert (white == 1).all()


def test_colours_are_red_green_blue():
    x = np.zeros((1, 3, 2, 2), dtype=np.uint8)
    x[0, :, 0, 1] = 255, 51, 0

    picture = montage(Arrays(x, np.zeros(1, dtype=np.int64), 1), Panel("", np.array([[0]]), ("",), ("",), ""), 255)

    assert picture[0, 1].tolist() == [1, 0.2, 0]


def test_a_sheet_is_a_png_and_an_svg(tmp_path):
    paths = draw_sheet("digits", None, tmp_path)

    assert [path.name for path in paths] == ["sheet-digits.png", "sheet-digits.svg"]
    with Image.open(paths[0]) as picture:
        assert min(picture.size) > 1000
    assert "digits" in paths[1].read_text()


def shown_texts(monkeypatch, *arguments):
    """All texts of the figure that would be saved."""
    seen = []
    monkeypatch.setattr("fedbench.report.sheet.save_figure", lambda figure, folder, name: seen.append((figure, name)))
    draw_sheet(*arguments)
    ((figure, name),) = seen
    ticks = [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]
    return name, [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)], ticks


@pytest.mark.parametrize("reverse", ["invert", "rot180", "labels"])
def test_reversed_halves_are_named(monkeypatch, tmp_path, reverse):
    name, titles, _ = shown_texts(monkeypatch, "digits", f"clusters[reverse={reverse}]", tmp_path)

    assert name == f"sheet-digits-clusters_reverse={reverse}"
    assert titles == [f"digits, clusters[reverse={reverse}]", "as it is", f"reversed ({reverse})"]


def test_the_halves_of_a_pair_have_the_names_of_their_data_sets(monkeypatch, tmp_path):
    _, titles, _ = shown_texts(monkeypatch, "pair[first=digits,second=digits]", None, tmp_path, tmp_path)

    assert titles[1:] == ["digits", "digits"]


def test_the_rows_of_corruptions_have_their_names(monkeypatch, tmp_path):
    name = "cifar100c[base='synthetic[classes=4,per_class=10,shape=3x8x8]']"

    _, _, ticks = shown_texts(monkeypatch, name, None, tmp_path, tmp_path)

    assert (len(ticks), ticks[0], ticks[9], ticks[18]) == (19, "gaussian_noise", "fog", "saturate")


def test_rotated_halves_are_drawn_upside_down(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("fedbench.report.sheet.save_figure", lambda figure, folder, name: seen.append(figure))

    draw_sheet("digits", "clusters[reverse=rot180]", tmp_path)

    left, right = (axes.images[0].get_array() for axes in seen[0].axes)
    assert np.array_equal(left[:8, :8], right[:8, :8][::-1, ::-1])
    assert not np.array_equal(left[:8, :8], right[:8, :8])


# --- what has no sheet ---


@pytest.mark.parametrize("name", ["covtype", "quadratics", "synthetic[shape=2x8x8]"])
def test_what_is_no_image_has_one_clear_message(name, tmp_path):
    with pytest.raises(FedbenchError, match="has no images to draw"):
        draw_sheet(name, None, tmp_path, tmp_path)

    assert not any(tmp_path.iterdir())


def test_the_command_prints_the_files(tmp_path):
    shown = CliRunner().invoke(app, ["datasets", "sheet", "digits", "--out", str(tmp_path)], catch_exceptions=False)

    assert shown.exit_code == 0
    assert shown.stdout.split() == [f"{tmp_path}/sheet-digits.png", f"{tmp_path}/sheet-digits.svg"]

"""A user's own files: how tables, arrays and pictures are read, named by their content, and refused when bad."""

import csv
import os
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedbench.dataset import DataError, dataset_name, datasets, fetch, find_dataset, load_arrays, presence, verify
from fedbench.errors import FedbenchError
from fedbench.job import build_job
from fedbench.queue import enqueue, listing
from fedbench.selector import write_selector
from fedbench.simulation import Surroundings, simulate
from fedbench.split import cut

KINDS = ("csv", "npz", "folder")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder in which the command would run; the data root lies beside it."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path / "data"))
    return folder


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


@pytest.fixture
def read(here, root):
    """Loads a data set by its name, twice: from the source, and from the cache that this made."""

    def load(name):
        first, second = (load_arrays(find_dataset(name), root) for _ in range(2))
        assert first.sha256() == second.sha256()
        return second

    return load


@pytest.fixture
def refused(here, root):
    """The message and the hint of a data set that is refused; nothing of it may stay in the data root."""

    def attempt(name, match):
        with pytest.raises(DataError, match=match) as caught:
            load_arrays(find_dataset(name), root)
        assert [path for path in root.glob("fedbench/*") if path.suffix != ".lock"] == []
        return str(caught.value)

    return attempt


def write(path, *lines):
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def save(path="mine.npz", **arrays):
    np.savez(path, **arrays)


def picture(path, pixels, **options):
    """A picture of these pixels; the folders to it are made."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(path, **options)


# --- tables as CSV ---


def test_a_table_has_features_labels_clients_and_official_parts(here, read):
    write(
        "mine.csv",
        "age,label,client,split,weight",
        "1,dog,b,test,10",
        "2,cat,a,train,20",
        "4,dog,b,train,40",
    )

    arrays = read("csv[path=mine.csv,standardise=false]")

    assert arrays.x.dtype == np.float32
    assert arrays.x.tolist() == [[[[2, 20]]], [[[4, 40]]], [[[1, 10]]]]  # training rows first, in their order
    assert arrays.y.tolist() == [0, 1, 1]  # cat, dog, dog
    assert arrays.group.tolist() == [0, 1, 1]  # a, b, b
    assert arrays.n_train == 2


def test_what_is_known_of_a_table_comes_from_its_content(here):
    write("mine.csv", "a,b,label,client", "1,2,x,7", "3,4,y,7", "5,6,z,8")

    table = find_dataset("csv[path=mine.csv]")

    assert (table.shape, table.classes, table.groups, table.full_scale, table.title) == (
        (1, 1, 2), 3, 2, 1, "mine.csv"
    )  # fmt: skip


def test_other_columns_may_hold_labels_and_clients(here, read):
    write("mine.csv", "species,hospital,a", "x,h1,1", "y,h2,2")

    arrays = read("csv[path=mine.csv,label=species,client=hospital,standardise=false]")

    assert (arrays.x.ravel().tolist(), arrays.y.tolist(), arrays.group.tolist()) == ([1, 2], [0, 1], [0, 1])


def test_without_the_columns_client_and_split_all_is_training_data_of_nobody(here, read):
    write("mine.csv", "a,label", "1,x", "2,y")

    arrays = read("csv[path=mine.csv]")

    assert (arrays.n_train, arrays.group) == (2, None)


def test_features_are_standardised_by_the_training_rows_only(here, read):
    write("mine.csv", "a,b,label,split", "1,7,0,train", "3,7,1,train", "7,9,0,test")

    arrays = read("csv[path=mine.csv]")

    # a: mean 2, deviation 1 on 1 and 3; b is constant there
    assert arrays.x[:, 0, 0].tolist() == pytest.approx(np.array([[-1, 0], [1, 0], [5, 0]]))


def test_large_numbers_are_standardised_without_overflow(here, read):
    write("mine.csv", "a,label", "-1e300,0", "1e300,1")

    assert read("csv[path=mine.csv]").x.ravel().tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["10", "9", "-3"], [2, 1, 0]),  # as numbers
        (["10", "9", "x"], [0, 1, 2]),  # as text
        (["NA", "b", "a"], [0, 2, 1]),  # not a missing value
        (["1_0", "10", "2"], [1, 0, 2]),  # text, and not 10 twice
    ],
)
def test_labels_are_numbered_in_sorted_order(here, read, labels, expected):
    write("mine.csv", "label,a", *(f"{label},1" for label in labels))

    assert read("csv[path=mine.csv]").y.tolist() == expected


def test_a_byte_order_mark_windows_line_ends_blank_lines_and_spaces_do_not_matter(here, read):
    Path("mine.csv").write_bytes('\ufefflabel, a\r\n\r\nx, 1\r\n"y", "2"\r\n\r\n'.encode())

    arrays = read("csv[path=mine.csv,standardise=false]")

    assert (arrays.x.ravel().tolist(), arrays.y.tolist()) == ([1, 2], [0, 1])


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)
names = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=5).map(lambda text: f"_{text}")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.lists(st.tuples(finite, finite, names, names), min_size=2, max_size=8, unique_by=lambda row: row[2]))
def test_whatever_is_written_as_csv_is_read_back(here, rows):
    with Path("mine.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("a", "b", "label", "client"), *rows])

    arrays = find_dataset("csv[path=mine.csv,standardise=false]").decode()

    assert arrays.x[:, 0, 0].tolist() == [[a, b] for a, b, _, _ in rows]
    labels, clients = (sorted({row[place] for row in rows}) for place in (2, 3))
    assert [labels[label] for label in arrays.y] == [row[2] for row in rows]
    assert [clients[client] for client in arrays.group] == [row[3] for row in rows]


@pytest.mark.parametrize(
    ("lines", "match"),
    [
        ([], r"mine\.csv is empty"),
        ([""], r"mine\.csv is empty"),
        (["a,label"], "no rows below its header"),
        (["a,b", "1,2"], r"no column label; it has a, b\."),
        (["a;label", "1;x"], r"no column label; it has a;label\."),
        (["label", "x", "y"], "no features: its columns are label"),
        (["a,label,a", "1,x,2"], "two columns called a"),
        ([",a,label", "0,1,x"], r"column 1 of .*mine\.csv has no name"),
        (["a,b,label", "1,2,x", "3,red,y"], r"line 3, column b: 'red' is not a finite number"),
        (["a,b,label", "1,2,x", "nan,4,y"], r"line 3, column a: 'nan' is not a finite number"),
        (["a,b,label", "1,inf,x", "3,4,y"], r"line 2, column b: 'inf' is not a finite number"),
        (["a,b,label", "1,1_000,x", "3,4,y"], r"line 2, column b: '1_000' is not a finite number"),
        (["a,b,label", "1,,x", "3,4,y"], "line 2, column b: nothing there"),
        (["a,label", "1,", "2,y"], "line 2, column label: nothing there"),
        (["a,label,client", "1,x,c", "2,y, "], "line 3, column client: nothing there"),
        (["a,label", "1,x", "2,y,3"], r"line 3: 3 field\(s\), and the header has 2"),
        (["a,label", "1,x", "2"], r"line 3: 1 field\(s\), and the header has 2"),
        (["a,label", "1,0.5", "2,1"], r"column label of .* holds 0\.5, which is no class"),
        (["a,label", "1,x", "2,x"], "holds nothing but x"),
        (["a,label,split", "1,x,train", "2,y,val"], r"column split of .* holds 'val'"),
        (["a,label,split", "1,x,test", "2,y,test"], "says train nowhere"),
        (["a,label", '1,"x', "2,y"], "line 3: unexpected end of data"),
    ],
)
def test_a_bad_table_is_refused_with_the_place_that_is_bad(here, refused, lines, match):
    write("mine.csv", *lines)

    message = refused("csv[path=mine.csv]", match)

    assert "mine.csv" in message


def test_a_client_column_that_is_named_must_be_there(here, refused):
    write("mine.csv", "a,label,client", "1,x,c", "2,y,d")

    assert "client=NAME" in refused("csv[path=mine.csv,client=site]", "no column site; it has a, label, client")


def test_numbers_too_large_for_float32_are_refused_where_they_are_not_standardised(here, refused):
    write("mine.csv", "a,label", "1e39,x", "2,y")

    refused("csv[path=mine.csv,standardise=false]", "too large for float32")


def test_a_table_that_is_not_utf_8_is_refused(here, refused):
    Path("mine.csv").write_bytes(b"a,label\n1,caf\xe9\n2,y\n")

    refused("csv[path=mine.csv]", "not text in UTF-8")


# --- arrays ---


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 5, 6), (1, 5, 6)),
        ((2, 5, 6, 3), (3, 5, 6)),
        ((2, 5, 6, 1), (1, 5, 6)),
        ((2, 3, 5, 6), (3, 5, 6)),
        ((2, 1, 28, 28), (1, 28, 28)),
    ],
)
def test_images_may_have_their_channels_first_last_or_not_at_all(here, read, shape, expected):
    x = np.arange(np.prod(shape)).astype(np.uint8).reshape(shape)
    save(x=x, y=[0, 1])

    arrays, dataset = read("npz[path=mine.npz]"), find_dataset("npz[path=mine.npz]")

    assert arrays.x.shape[1:] == dataset.shape == expected
    assert (dataset.full_scale, dataset.classes, arrays.x.dtype) == (255, 2, np.uint8)
    # row 3, column 4 of channel 0, wherever the channels are
    there = {3: (1, 3, 4), 4: (1, 0, 3, 4) if shape[1] <= 3 else (1, 3, 4, 0)}[len(shape)]
    assert arrays.x[1, 0, 3, 4] == x[there]


def test_test_arrays_and_clients_stand_behind_the_training_arrays(here, read):
    save(
        x=np.full((2, 5, 5), 7, np.uint8),
        y=["b", "c"],
        x_test=np.full((1, 5, 5), 9, np.uint8),
        y_test=["a"],
        client=[20, 3],
        client_test=[20],
        notes=["whatever else there is"],
    )

    arrays = read("npz[path=mine.npz]")

    assert (arrays.x[:, 0, 0, 0].tolist(), arrays.n_train) == ([7, 7, 9], 2)
    assert (arrays.y.tolist(), arrays.group.tolist()) == ([1, 2, 0], [1, 0, 1])  # a, b, c; 3, 20


def test_a_table_of_numbers_is_standardised_by_the_training_rows(here, read):
    save(x=np.array([[1, 5], [3, 5]], np.float32), y=np.array([True, False]), x_test=[[7.0, 5.0]], y_test=[True])

    arrays = read("npz[path=mine.npz]")

    assert arrays.x[:, 0, 0].tolist() == [[-1, 0], [1, 0], [5, 0]]
    assert arrays.y.tolist() == [1, 0, 1]
    assert find_dataset("npz[path=mine.npz]").full_scale == 1
    assert read("npz[path=mine.npz,standardise=false]").x[:, 0, 0].tolist() == [[1, 5], [3, 5], [7, 5]]


IMAGES = np.zeros((2, 5, 5), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"y": [0, 1]}, "no array x; it has y"),
        ({"x": IMAGES}, "no array y; it has x"),
        ({"x": IMAGES, "y": [0, 1, 1]}, r"y has shape \(3,\), and x \(2, 5, 5\)"),
        ({"x": IMAGES, "y": 1}, r"y has shape \(\), and x"),
        ({"x": IMAGES, "y": [0, 1], "x_test": IMAGES}, "x_test, but no y_test"),
        ({"x": IMAGES, "y": [0, 1], "y_test": [0]}, "y_test, but no x_test"),
        ({"x": IMAGES, "y": [0, 1], "x_test": IMAGES, "y_test": [0]}, "y_test has shape"),
        (
            {"x": IMAGES, "y": [0, 1], "x_test": IMAGES, "y_test": [0, 1], "client": [1, 2]},
            "client, but no client_test",
        ),
        ({"x": IMAGES, "y": [0, 1], "client": [1]}, "client has shape"),
        ({"x": IMAGES, "y": [0, 1], "x_test": IMAGES[:, 1:], "y_test": [0, 1]}, "x and x_test differ in kind"),
        ({"x": IMAGES, "y": [0.5, 1.0]}, r"y of .* is float64"),
        ({"x": IMAGES, "y": [[0, 1], [1, 0]]}, r"y of .* has shape \(2, 2\)"),
        ({"x": IMAGES, "y": [3, 3]}, r"y of .* holds nothing but 3"),
        ({"x": IMAGES, "y": [0, 1], "client": [0.5, 1]}, r"client of .* is float64"),
        ({"x": IMAGES[:0], "y": np.zeros(0, int)}, "no samples"),
        ({"x": IMAGES.astype(np.float32), "y": [0, 1]}, "holds images as float32"),
        ({"x": np.zeros((2, 3, 5, 3), np.uint8), "y": [0, 1]}, "clearly the channels"),
        ({"x": np.zeros((2, 5, 5, 5), np.uint8), "y": [0, 1]}, "clearly the channels"),
        ({"x": np.zeros(2), "y": [0, 1]}, r"x of .* has shape \(2,\)"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, "A table holds numbers"),
        ({"x": [[1.0, 2.0], [3.0, np.nan]], "y": [0, 1]}, "row 1 of x, column 1, is nan"),
        ({"x": IMAGES, "y": np.array([0, "a"], dtype=object)}, r"y of .* holds Python objects, which are never loaded"),
    ],
)
def test_bad_arrays_are_refused(here, refused, arrays, match):
    save(**arrays)

    assert "mine.npz" in refused("npz[path=mine.npz]", match)


class Trap:
    """What a pickle can do."""

    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def test_a_pickle_in_an_array_is_never_opened(here, refused):
    trap = np.empty(2, dtype=object)
    trap[:] = [Trap(), Trap()]
    save(x=IMAGES, y=trap)

    refused("npz[path=mine.npz]", "holds Python objects")

    assert not Path("sprung").exists()


@pytest.mark.parametrize("content", [b"", b"no zip", pickle.dumps([1]), b"PK\x03\x04 and no more"])
def test_a_file_that_is_no_npz_is_refused(here, refused, content):
    Path("mine.npz").write_bytes(content)

    refused("npz[path=mine.npz]", r"mine\.npz is not an \.npz file")


def test_a_single_array_is_no_npz(here, refused):
    with Path("mine.npz").open("wb") as file:
        np.save(file, IMAGES)

    refused("npz[path=mine.npz]", r"is not an \.npz file")


def test_a_truncated_npz_is_refused(here, refused):
    save(x=IMAGES, y=[0, 1])
    content = Path("mine.npz").read_bytes()
    Path("mine.npz").write_bytes(content[: len(content) // 2])

    refused("npz[path=mine.npz]", r"is not an \.npz file")


# --- pictures ---


def test_a_sub_folder_is_a_class_and_pictures_lie_at_any_depth(here, read):
    picture("mine/dog/a.png", np.full((4, 4, 3), [1, 2, 3]))
    picture("mine/cat/old/b.BMP", np.full((9, 2, 3), [4, 5, 6]))
    picture("mine/cat/c.png", np.full((4, 4, 3), [7, 8, 9]))
    picture("mine/.hidden/d.png", np.zeros((4, 4)))
    picture("mine/cat/.e.png", np.zeros((4, 4)))
    write("mine/cat/notes.txt", "no picture")

    arrays, dataset = read("folder[path=mine,size=2]"), find_dataset("folder[path=mine,size=2]")

    assert arrays.x[:, :, 1, 1].tolist() == [[7, 8, 9], [4, 5, 6], [1, 2, 3]]  # cat/c.png, cat/old/b.BMP, dog/a.png
    assert (arrays.y.tolist(), arrays.n_train, arrays.group) == ([0, 0, 1], 3, None)
    assert (arrays.x.shape[1:], dataset.shape, dataset.classes, dataset.full_scale) == ((3, 2, 2), (3, 2, 2), 2, 255)


def test_train_and_test_at_the_top_are_the_official_parts(here, read):
    for path, value in {"test/b/1.png": 1, "train/a/2.png": 2, "train/b/3.png": 3, "test/c/4.png": 4}.items():
        picture(f"mine/{path}", np.full((2, 2), value))

    arrays = read("folder[path=mine,channels=1,size=2]")

    assert arrays.x[:, 0, 0, 0].tolist() == [2, 3, 1, 4]
    assert (arrays.y.tolist(), arrays.n_train) == ([0, 1, 1, 2], 2)
    assert find_dataset("folder[path=mine,channels=1,size=2]").classes == 3


def test_train_alone_is_a_part_and_train_beside_other_classes_is_a_class(here, read):
    for path in ("only/train/a/1.png", "only/train/b/2.png", "vehicles/car/1.png", "vehicles/train/2.png"):
        picture(path, np.zeros((2, 2)))

    assert read("folder[path=only]").y.tolist() == [0, 1]
    assert read("folder[path=vehicles]").y.tolist() == [0, 1]


@pytest.mark.parametrize(("channels", "expected"), [(1, [[100]]), (3, [[100], [100], [100]])])
@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "CMYK", "I;16"])
def test_pictures_of_every_mode_become_bytes(here, read, mode, channels, expected):
    grey = Image.new("L", (3, 3), 100)
    if mode == "I;16":
        other = Image.fromarray(np.full((3, 3), 100 << 8 | 255, np.uint16))
    else:
        other = grey.convert("RGB").convert(mode) if mode == "CMYK" else grey.convert(mode)
    for name in ("a", "b"):
        Path("mine", name).mkdir(parents=True)
        other.save(f"mine/{name}/1.tif")

    arrays = read(f"folder[path=mine,size=1,channels={channels}]")

    assert arrays.x[0, :, 0].tolist() == expected


def test_a_picture_is_turned_as_its_camera_says(here, read):
    left_is_dark = np.repeat([[0, 0, 255, 255]], 4, axis=0)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise: what is left goes up
    for name in ("a", "b"):
        picture(f"mine/{name}/1.png", left_is_dark, exif=exif)

    arrays = read("folder[path=mine,size=4,channels=1]")

    assert arrays.x[0, 0, :, 0].tolist() == [0, 0, 255, 255]


def test_a_large_picture_is_averaged_and_not_sampled(here, read):
    stripes = np.tile([[0, 200]], (64, 32))
    for name in ("a", "b"):
        picture(f"mine/{name}/1.png", stripes)

    inner = read("folder[path=mine,size=8,channels=1]").x[:, :, 1:-1, 1:-1]

    assert np.abs(inner.astype(int) - 100).max() <= 2


@pytest.mark.parametrize(
    ("pictures", "folders", "match"),
    [
        ([], [], "has no sub-folders"),
        (["1.png"], [], "has no sub-folders"),
        ([], ["a", "b"], "has no pictures in sub-folders"),
        (["a/1.png"], ["b"], r"class b has no pictures: .*mine/b"),
        (["train/a/1.png", "train/b/1.png", "test/a/1.png"], ["test/b"], r"class b has no pictures: .*mine/test/b"),
        (["train/a/1.png", "test/a/1.png", "c/1.png"], [], "folders beside train and test: c"),
        (["train/a/1.png", "val/a/1.png"], [], "has train and val"),
        (["a/1.png"], [], "has one class only, a"),
    ],
)
def test_a_folder_that_is_not_laid_out_so_is_refused(here, refused, pictures, folders, match):
    Path("mine").mkdir()
    for path in pictures:
        picture(f"mine/{path}", np.zeros((2, 2)))
    for path in folders:
        Path("mine", path).mkdir(parents=True)

    refused("folder[path=mine]", match)


@pytest.mark.parametrize("kept", [0, 10, -30], ids=["empty", "in its header", "in its pixels"])
def test_a_picture_that_cannot_be_decoded_is_named(here, refused, kept):
    for name in ("a", "b"):
        picture(f"mine/{name}/1.png", np.random.default_rng(0).integers(0, 256, (20, 20)))
    broken = here / "mine" / "b" / "1.png"
    broken.write_bytes(broken.read_bytes()[:kept])

    refused("folder[path=mine]", re.escape(f"the picture {broken} cannot be decoded"))


def test_pixels_of_32_bits_are_refused_rather_than_cut_off(here, refused):
    for name in ("a", "b"):
        Path("mine", name).mkdir(parents=True)
        Image.fromarray(np.full((2, 2), 0.5, np.float32)).save(f"mine/{name}/1.tif")

    refused("folder[path=mine]", "its pixels have 32 bits")


@pytest.mark.parametrize("setting", ["channels=2", "size=0", "size=big"])
def test_wrong_settings_are_refused(here, setting):
    with pytest.raises(FedbenchError, match=f"wrong setting for data set folder:\n{setting.partition('=')[0]}"):
        find_dataset(f"folder[path=mine,sha256='0123456789abcdef',{setting}]")


# --- names ---


@pytest.fixture
def mine(here):
    """A small table of two clients with ten rows each."""
    rows = [f"{number},{number % 2},{number // 10}" for number in range(20)]
    write("mine.csv", "a,label,client", *rows)
    return here / "mine.csv"


# sha256sum of "a,label,client\n0,0,0\n1,1,0\n...19,1,1\n"
MINE = "4afe2f55c26198dd"


def test_the_complete_name_has_the_whole_path_and_the_hash_of_the_content(mine):
    assert dataset_name("csv[path=mine.csv]") == f"csv[path={mine},sha256={MINE}]"
    assert dataset_name("csv[standardise=true,path=./x/../mine.csv]") == f"csv[path={mine},sha256={MINE}]"
    assert dataset_name("csv[path=mine.csv,standardise=false]") == f"csv[path={mine},sha256={MINE},standardise=False]"


def test_a_tilde_is_the_home_folder(mine, monkeypatch):
    monkeypatch.setenv("HOME", str(mine.parent))

    assert dataset_name("csv[path=~/mine.csv]") == dataset_name("csv[path=mine.csv]")


def test_a_complete_name_means_the_same_wherever_it_is_read(mine, tmp_path, monkeypatch):
    name = dataset_name("csv[path=mine.csv]")
    monkeypatch.chdir(tmp_path)

    assert dataset_name(name) == name


def test_a_complete_name_needs_no_file(mine):
    name = dataset_name("csv[path=mine.csv]")
    mine.unlink()

    assert find_dataset(name).name() == name


@pytest.mark.parametrize(
    "name", ["a, b.csv", "[x].csv", "a=b.csv", "it's.csv", "'.csv", "2024", " a ", "a #b: c", "ä ✓"]
)
def test_files_with_unusual_names_are_found_in_quotes(mine, root, name):
    mine.rename(mine.with_name(name))

    complete = dataset_name(write_selector("csv", {"path": name}))

    assert find_dataset(complete).params.path == str(mine.with_name(name))
    assert len(load_arrays(find_dataset(complete), root).y) == 20


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_without_a_path_says_how_to_give_one(kind):
    with pytest.raises(FedbenchError, match="path: Field required") as caught:
        find_dataset(kind)

    assert caught.value.hint == f"Write {kind}[path=...]."


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_not_there_is_one_clear_error(here, kind):
    with pytest.raises(DataError, match=re.escape(f"there is no {here / 'gone'}")):
        find_dataset(f"{kind}[path=gone]")


def test_a_folder_is_no_file_and_a_file_is_no_folder(mine):
    for kind in ("csv", "npz"):
        with pytest.raises(DataError, match="is not a file"):
            find_dataset(f"{kind}[path=.]")
    with pytest.raises(DataError, match="is a file, not a folder"):
        find_dataset("folder[path=mine.csv]")


def test_a_file_that_may_not_be_read_is_one_clear_error(mine, monkeypatch):
    def forbidden(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", forbidden)

    with pytest.raises(DataError, match=re.escape(f"{mine} cannot be read: Permission denied")):
        find_dataset("csv[path=mine.csv]")


@pytest.mark.parametrize("path", ["2024", "2024-01-01", "1e3"])
def test_a_path_that_looks_like_a_number_must_be_in_quotes(path):
    with pytest.raises(FedbenchError, match="put it in quotes"):
        find_dataset(f"csv[path={path}]")


# --- changes ---


def test_a_changed_file_is_another_data_set_with_another_job_key(mine, root):
    def look():
        job = build_job({"method": "fedavg", "dataset": "csv[path=mine.csv]", "clients": 2, "partition": "natural"})
        return (
            job.key,
            find_dataset("csv[path=mine.csv]").classes,
            len(load_arrays(find_dataset("csv[path=mine.csv]"), root).y),
        )

    before, again = look(), look()
    with mine.open("a") as file:
        file.write("20,2,1\n")
    after = look()

    assert before == again
    assert (before[1:], after[1:]) == ((2, 20), (3, 21))
    assert before[0] != after[0]


def test_a_job_does_not_run_on_other_content_than_it_was_made_for(mine, root):
    job = build_job({"method": "fedavg", "dataset": "csv[path=mine.csv]", "clients": 2, "partition": "natural"})
    mine.write_text(mine.read_text() + "20,1,1\n")

    with pytest.raises(DataError, match=rf"mine\.csv has changed: its SHA-256 begins with \w{{16}}, not with {MINE}"):
        cut(job, root)


def test_content_that_has_been_decoded_before_is_used_when_the_file_is_gone(mine, root):
    name = dataset_name("csv[path=mine.csv]")
    load_arrays(find_dataset(name), root)
    find_dataset(name)._known.clear()  # as in the process of a worker
    mine.unlink()

    dataset = find_dataset(name)

    assert len(load_arrays(dataset, root).y) == 20
    assert (dataset.shape, dataset.classes, dataset.groups) == ((1, 1, 1), 2, 2)


def test_shape_and_classes_are_not_looked_up_in_a_changed_file(mine):
    table = find_dataset("csv[path=mine.csv]")
    mine.write_text(mine.read_text() + "20,2,1\n")

    with pytest.raises(DataError, match="has changed"):
        _ = table.classes


def test_a_hash_in_the_grid_demands_that_content(mine, root):
    assert len(load_arrays(find_dataset(f"csv[path=mine.csv,sha256={MINE}]"), root).y) == 20
    with pytest.raises(DataError, match="has changed"):
        load_arrays(find_dataset("csv[path=mine.csv,sha256='0123456789abcdef']"), root)


def change_a_pixel():
    picture("mine/a/1.png", np.full((2, 2), 77))


def rename_a_class():
    Path("mine/a").rename("mine/c")


def add_a_picture():
    picture("mine/a/0.png", np.zeros((2, 2)))


@pytest.mark.parametrize("change", [change_a_pixel, rename_a_class, add_a_picture])
def test_every_change_of_a_folder_of_pictures_is_seen(here, change):
    for name in ("a", "b"):
        picture(f"mine/{name}/1.png", np.zeros((9, 9)))
    before = dataset_name("folder[path=mine]")
    write("mine/a/notes.txt", "no picture")
    assert dataset_name("folder[path=mine]") == before

    change()

    assert dataset_name("folder[path=mine]") != before


def test_a_changed_file_in_a_pair_is_another_pair(mine, root):
    pair = "pair[first='csv[path=mine.csv]',second='csv[path=mine.csv,standardise=false]']"
    before = find_dataset(pair)
    assert len(load_arrays(before, root).y) == 40
    mine.write_text(mine.read_text() + "20,1,1\n")

    assert find_dataset(pair).name() != before.name()
    assert len(load_arrays(find_dataset(pair), root).y) == 42


def test_the_queue_lists_jobs_whose_files_are_gone(mine, engine):
    job = build_job({"method": "fedavg", "dataset": "csv[path=mine.csv]", "clients": 2, "partition": "natural"})
    enqueue(engine, "g", {}, [job])
    mine.unlink()

    (queued,) = listing(engine)

    assert queued.spec.key == job.key
    assert queued.spec.label == f"fedavg csv[path={mine},sha256={MINE}] seed 0"


# --- beside the other data sets ---


def test_the_column_of_clients_is_the_natural_partition(mine, root):
    job = build_job({"method": "fedavg", "dataset": "csv[path=mine.csv]", "clients": 2, "partition": "natural"})

    _, arrays, split = cut(job, root)

    owners = [arrays.group[np.concatenate(parts)] for parts in zip(split.train, split.test, strict=True)]
    assert [np.unique(owner).tolist() for owner in owners] == [[0], [1]]


def test_methods_train_on_arrays_and_pictures(here, root, recorder, tmp_path):
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    pixels = (80 * y[:, None, None] + rng.integers(0, 60, (60, 8, 8))).astype(np.uint8)
    save(x=pixels, y=y)
    for number, (label, image) in enumerate(zip(y, pixels, strict=True)):
        picture(f"photos/kind {label}/{number}.png", image)
    protocol = {"method": "fedavg", "clients": 2, "rounds": 8, "lr": 0.1, "batch_size": 10, "eval_every": 1}
    cutting = {"partition": "dirichlet", "alpha": 10, "fraction": 1, "min_size": 5}

    for name in ("npz[path=mine.npz]", "folder[path=photos,size=8,channels=1]"):
        recorder.kept.clear()
        job = build_job({**protocol, **cutting, "dataset": name})
        assert simulate(job, recorder, Surroundings(checkpoints=tmp_path / "checkpoints", data_root=root)) == "done"
        assert recorder.curve("gm")[8] > 0.9  # the brightness says it all


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_files_is_neither_missing_nor_there(kind, tmp_path):
    assert presence(datasets.get(kind), tmp_path) == "by path"
    assert datasets.get(kind).classes == 0


def test_verifying_reads_the_file_and_changes_nothing(mine, root):
    assert verify(find_dataset("csv[path=mine.csv]"), root) == "the hash in its name"
    assert not root.exists()

    write(mine, "a,label", "1,x", "red,y")
    with pytest.raises(DataError, match="'red' is not a finite number"):
        verify(find_dataset("csv[path=mine.csv]"), root)


def test_fetching_decodes_it_into_the_cache(mine, root):
    assert fetch(find_dataset("csv[path=mine.csv]"), root) == "your own files"
    assert fetch(find_dataset("csv[path=mine.csv]"), root) == "the cache"

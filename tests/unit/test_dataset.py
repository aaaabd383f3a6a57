"""Where the bytes of a data set lie: the cache, the content hash, and every way in which both can be wrong."""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat

from fedbench.dataset import (
    Arrays,
    DataError,
    Dataset,
    data_root,
    datasets,
    find_dataset,
    load_arrays,
    presence,
    verify,
)
from fedbench.errors import FedbenchError
from fedbench.vision import torchvision_datasets

# Three images of 2x2 pixels, two of them official training data.
TINY = Arrays(
    x=np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2),
    y=np.array([0, 1, 0], dtype=np.int64),
    n_train=2,
)
# sha256 over the text "(3, 1, 2, 2)2", the bytes 0..11, and the labels as little-endian 64-bit integers
TINY_SHA256 = "915e3bf62c7ed66ea46e610aad09db98dc022cbd506203185f2ba1b39ccc7460"


class Tiny(Dataset):
    """A data set whose source is one file, `tiny.txt`, in the data root."""

    title = "Tiny"
    shape = (1, 2, 2)
    classes = 2
    sha256 = TINY_SHA256
    reads: ClassVar[int] = 0
    downloads: ClassVar[int] = 0

    @classmethod
    def read(cls, root: Path) -> Arrays:
        cls.reads += 1
        if "damaged" in (root / "tiny.txt").read_text():
            raise IndexError("list index out of range")
        return TINY

    @classmethod
    def download(cls, root: Path) -> None:
        cls.downloads += 1
        raise OSError("Name or service not known")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> type[Tiny]:
    monkeypatch.setattr(Tiny, "reads", 0)
    monkeypatch.setattr(Tiny, "downloads", 0)
    return Tiny


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data root that holds the source of Tiny."""
    (tmp_path / "tiny.txt").write_text("whole")
    return tmp_path


def cache_of(dataset: type[Dataset], root: Path) -> Path:
    return root / "fedbench" / dataset.name()


# --- the content hash ---


def test_the_hash_is_of_shape_pixels_and_labels() -> None:
    assert TINY.sha256() == TINY_SHA256


def test_the_hash_does_not_depend_on_how_the_arrays_lie_in_memory() -> None:
    scattered = Arrays(np.asfortranarray(TINY.x), TINY.y.astype(">i8"), TINY.n_train)

    assert scattered.sha256() == TINY_SHA256


@pytest.mark.parametrize(
    "other",
    [
        Arrays(TINY.x + np.uint8(1), TINY.y, 2),
        Arrays(TINY.x, TINY.y[::-1] + 1, 2),
        Arrays(TINY.x, TINY.y, 1),
        Arrays(TINY.x.reshape(3, 1, 1, 4), TINY.y, 2),
    ],
    ids=["pixels", "labels", "n_train", "shape"],
)
def test_the_hash_changes_with_the_content(other: Arrays) -> None:
    assert other.sha256() != TINY_SHA256


# --- the cache ---


def test_loading_gives_the_content(tiny: type[Tiny], root: Path) -> None:
    arrays = load_arrays(tiny, root)

    assert np.array_equal(arrays.x, TINY.x)
    assert np.array_equal(arrays.y, TINY.y)
    assert arrays.n_train == 2
    assert (arrays.x.dtype, arrays.y.dtype) == (np.uint8, np.int64)


def test_the_first_load_makes_a_cache(tiny: type[Tiny], root: Path) -> None:
    load_arrays(tiny, root)

    assert sorted(path.name for path in cache_of(tiny, root).iterdir()) == ["n_train.npy", "x.npy", "y.npy"]


@pytest.mark.parametrize("load", [1, 2], ids=["first load", "second load"])
def test_images_are_memory_mapped(tiny: type[Tiny], root: Path, load: int) -> None:
    for _ in range(load):
        arrays = load_arrays(tiny, root)

    assert isinstance(arrays.x, np.memmap)
    assert Path(str(arrays.x.filename)) == cache_of(tiny, root) / "x.npy"


def test_writing_to_the_images_does_not_reach_the_cache(tiny: type[Tiny], root: Path) -> None:
    load_arrays(tiny, root).x[:] = 0

    assert np.array_equal(load_arrays(tiny, root).x, TINY.x)


def test_the_second_load_does_not_read_the_source(tiny: type[Tiny], root: Path) -> None:
    load_arrays(tiny, root)
    (root / "tiny.txt").unlink()

    load_arrays(tiny, root)

    assert tiny.reads == 1


def test_an_embedded_data_set_is_not_cached(tiny: type[Tiny], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "embedded", True)

    load_arrays(tiny, root)

    assert not (root / "fedbench").exists()


# --- wrong content ---


def test_content_with_another_hash_is_refused_by_both_hashes(
    tiny: type[Tiny], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "sha256", "0123456789abcdef" + "0" * 48)

    with pytest.raises(DataError, match="Tiny") as caught:
        load_arrays(tiny, root)

    assert TINY_SHA256[:16] in caught.value.message
    assert "0123456789abcdef" in caught.value.message
    assert str(root) in caught.value.message
    assert "Delete them" in caught.value.hint


def test_content_with_another_hash_is_not_cached(tiny: type[Tiny], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "sha256", "0" * 64)

    with pytest.raises(DataError):
        load_arrays(tiny, root)

    assert not cache_of(tiny, root).exists()


def test_an_embedded_data_set_with_another_hash_is_refused(
    tiny: type[Tiny], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "embedded", True)
    monkeypatch.setattr(tiny, "sha256", "0" * 64)

    with pytest.raises(DataError, match="the installed Tiny"):
        load_arrays(tiny, root)


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "n_train.npy"])
@pytest.mark.parametrize("kept", [0, 5, 40, -1], ids=["empty", "in magic", "in header", "last byte"])
def test_a_truncated_cache_is_damaged_and_names_its_folder(tiny: type[Tiny], root: Path, name: str, kept: int) -> None:
    load_arrays(tiny, root)
    path = cache_of(tiny, root) / name
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(DataError) as caught:
        load_arrays(tiny, root)

    assert "damaged" in caught.value.message
    assert str(cache_of(tiny, root)) in str(caught.value)
    assert "Delete" in caught.value.hint


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "n_train.npy"])
def test_a_cache_without_one_of_its_files_is_damaged(tiny: type[Tiny], root: Path, name: str) -> None:
    load_arrays(tiny, root)
    (cache_of(tiny, root) / name).unlink()

    with pytest.raises(DataError, match="is damaged"):
        load_arrays(tiny, root)


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "n_train.npy"])
def test_a_flipped_bit_in_the_data_of_a_cache_is_found(tiny: type[Tiny], root: Path, name: str) -> None:
    load_arrays(tiny, root)
    path = cache_of(tiny, root) / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(DataError, match="is not the data set it should be") as caught:
        load_arrays(tiny, root)

    assert str(cache_of(tiny, root)) in caught.value.message


@pytest.mark.filterwarnings("ignore:Data type alias:DeprecationWarning")
@pytest.mark.parametrize("name", ["x.npy", "y.npy", "n_train.npy"])
def test_no_flipped_bit_of_a_cache_goes_unnoticed(tiny: type[Tiny], root: Path, name: str) -> None:
    """Every bit of the file, header included: a DataError, or content that is whole (a bit of the padding)."""
    load_arrays(tiny, root)
    path = cache_of(tiny, root) / name
    whole = path.read_bytes()

    for position in range(len(whole)):
        for bit in range(8):
            content = bytearray(whole)
            content[position] ^= 1 << bit
            path.write_bytes(content)
            try:
                arrays = load_arrays(tiny, root)
            except DataError:
                continue
            assert np.array_equal(arrays.x, TINY.x), (position, bit)
            assert np.array_equal(arrays.y, TINY.y), (position, bit)
            assert (arrays.x.dtype, arrays.y.dtype) == (np.uint8, np.int64), (position, bit)


# --- nothing half-written ---


def test_damaged_source_files_are_one_clear_error(tiny: type[Tiny], root: Path) -> None:
    (root / "tiny.txt").write_text("damaged")

    with pytest.raises(DataError, match="are damaged: IndexError: list index out of range") as caught:
        load_arrays(tiny, root)

    assert str(root) in caught.value.message
    assert "fetch them again" in caught.value.hint


def test_damaged_source_files_are_not_replaced_by_a_download(tiny: type[Tiny], root: Path) -> None:
    (root / "tiny.txt").write_text("damaged")

    with pytest.raises(DataError):
        load_arrays(tiny, root)

    assert tiny.downloads == 0


def test_no_folder_is_left_when_reading_fails(tiny: type[Tiny], root: Path) -> None:
    (root / "tiny.txt").write_text("damaged")

    with pytest.raises(DataError):
        load_arrays(tiny, root)

    assert [path for path in (root / "fedbench").iterdir() if path.is_dir()] == []


def test_no_cache_is_left_when_the_disk_is_full(tiny: type[Tiny], root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = np.save

    def full_at_the_labels(path: Path, array: object) -> None:
        if path.name == "y.npy":
            raise OSError(28, "No space left on device")
        save(path, array)

    monkeypatch.setattr(np, "save", full_at_the_labels)

    with pytest.raises(DataError, match="No space left on device"):
        load_arrays(tiny, root)

    assert not cache_of(tiny, root).exists()


def test_the_next_load_mends_what_a_crash_left(tiny: type[Tiny], root: Path) -> None:
    left = root / "fedbench" / f"{tiny.name()}.partial"
    left.mkdir(parents=True)
    (left / "x.npy").write_bytes(b"half")

    arrays = load_arrays(tiny, root)

    assert np.array_equal(arrays.x, TINY.x)
    assert not left.exists()


def test_a_data_root_that_cannot_be_written_is_one_clear_error(tiny: type[Tiny], tmp_path: Path) -> None:
    root = tmp_path / "file"
    root.write_text("in the way")

    with pytest.raises(DataError, match="cannot be written") as caught:
        load_arrays(tiny, root)

    assert "--data" in caught.value.hint


# --- missing ---


def test_a_missing_data_set_without_network_is_one_clear_error(tiny: type[Tiny], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Name or service not known") as caught:
        load_arrays(tiny, tmp_path)

    assert "Tiny is not under" in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert "--data" in caught.value.hint
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # one message, no chain of exceptions
    assert tiny.downloads == 1


def test_a_data_set_without_a_source_says_so(tmp_path: Path) -> None:
    class Homemade(Dataset):
        title = "Homemade"
        shape = (1, 2, 2)
        classes = 2
        sha256 = TINY_SHA256
        read = Tiny.read

    with pytest.raises(DataError, match=r"Homemade is not under .* there is nowhere to fetch it from") as caught:
        load_arrays(Homemade, tmp_path)

    assert "--data" in caught.value.hint


def test_a_missing_data_set_is_downloaded_and_read(tmp_path: Path) -> None:
    class Reachable(Tiny):
        @classmethod
        def download(cls, root: Path) -> None:
            (root / "tiny.txt").write_text("whole")

    arrays = load_arrays(Reachable, tmp_path)

    assert np.array_equal(arrays.x, TINY.x)


def test_a_download_of_something_else_is_refused(tmp_path: Path) -> None:
    class Changed(Tiny):
        sha256 = "0" * 64

        @classmethod
        def download(cls, root: Path) -> None:
            (root / "tiny.txt").write_text("whole")

    with pytest.raises(DataError, match="is not the data set it should be"):
        load_arrays(Changed, tmp_path)


def test_a_download_that_leaves_no_files_is_not_blamed_on_the_data_root(tmp_path: Path) -> None:
    class Empty(Tiny):
        @classmethod
        def download(cls, root: Path) -> None:
            return

    with pytest.raises(DataError) as caught:
        load_arrays(Empty, tmp_path)

    assert "cannot be written" not in str(caught.value)


def test_a_data_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(DataError("what is wrong.", "The way out.")))

    assert isinstance(error, DataError)
    assert str(error) == "what is wrong.\nThe way out."


# --- presence ---


def test_an_embedded_data_set_is_always_there(tmp_path: Path) -> None:
    assert presence(datasets.get("digits"), tmp_path) == "embedded"


def test_source_files_make_a_data_set_present_without_a_cache(tiny: type[Tiny], root: Path) -> None:
    assert presence(tiny, root) == "present"
    assert not (root / "fedbench").exists()


def test_a_cache_makes_a_data_set_present(tiny: type[Tiny], root: Path) -> None:
    load_arrays(tiny, root)
    (root / "tiny.txt").unlink()

    assert presence(tiny, root) == "present"


def test_a_data_set_without_files_is_missing_and_not_fetched(tiny: type[Tiny], tmp_path: Path) -> None:
    assert presence(tiny, tmp_path) == "missing"
    assert tiny.downloads == 0


def test_damaged_source_files_are_seen_as_damaged(tiny: type[Tiny], root: Path) -> None:
    (root / "tiny.txt").write_text("damaged")

    assert presence(tiny, root) == "damaged"


def test_a_damaged_cache_is_seen_as_damaged(tiny: type[Tiny], root: Path) -> None:
    load_arrays(tiny, root)
    (cache_of(tiny, root) / "x.npy").write_bytes(b"")

    assert presence(tiny, root) == "damaged"


# --- several at once ---


def test_two_threads_build_the_cache_once(root: Path) -> None:
    class Slow(Tiny):
        reads: ClassVar[int] = 0

        @classmethod
        def read(cls, root: Path) -> Arrays:
            cls.reads += 1
            time.sleep(0.1)  # long enough for the other thread to arrive
            return TINY

    start = threading.Barrier(2)

    def load() -> Arrays:
        start.wait(timeout=30)
        return load_arrays(Slow, root)

    with ThreadPoolExecutor(2) as pool:
        loaded = [future.result() for future in [pool.submit(load), pool.submit(load)]]

    assert all(np.array_equal(arrays.x, TINY.x) for arrays in loaded)
    assert Slow.reads == 1


SLOW_MODULE = """
import sys, time
from pathlib import Path
import numpy as np
from fedbench.dataset import Arrays, Dataset, load_arrays


class Slow(Dataset):
    title = "Slow"
    shape = (1, 2, 2)
    classes = 2
    sha256 = "{sha256}"

    @classmethod
    def read(cls, root):
        with open(root / "reads.txt", "a") as log:
            log.write("read\\n")
        time.sleep(0.3)
        return Arrays(np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2), np.array([0, 1, 0]), 2)


root = Path(sys.argv[1])
(root / f"ready{{sys.argv[2]}}").touch()
while len(list(root.glob("ready*"))) < 2:  # both start together
    time.sleep(0.005)
print(int(load_arrays(Slow, root).x.sum()))
"""


def test_two_processes_build_the_cache_once(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW_MODULE.format(sha256=TINY_SHA256))

    running = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), number],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in ("1", "2")
    ]
    finished = [process.communicate(timeout=60) for process in running]

    assert [out for out, _ in finished] == ["66\n", "66\n"], finished  # 0 + 1 + ... + 11
    assert (tmp_path / "reads.txt").read_text() == "read\n"


# --- the data root ---


def test_the_given_data_root_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", "/from/environment")

    assert data_root("/given") == Path("/given")


def test_the_environment_names_the_data_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_DATA", "/from/environment")

    assert data_root() == Path("/from/environment")


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_the_default_data_root_is_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("FEDBENCH_DATA", raising=False)
    if value is not None:
        monkeypatch.setenv("FEDBENCH_DATA", value)

    assert data_root() == Path("/home/someone/.cache/fedbench/data")


@pytest.mark.parametrize("given", ["~/data", Path("~/data")], ids=["text", "path"])
def test_a_tilde_means_the_users_home(monkeypatch: pytest.MonkeyPatch, given: str | Path) -> None:
    monkeypatch.setenv("HOME", "/home/someone")

    assert data_root(given) == Path("/home/someone/data")


# --- the data sets that ship ---


def test_the_digits_are_verified_and_need_no_data_root() -> None:
    digits = datasets.get("digits")

    arrays = load_arrays(digits, Path("/nowhere"))

    assert arrays.x.shape == (1797, 1, 8, 8)
    assert arrays.sha256() == digits.sha256


def test_the_digits_use_their_whole_scale() -> None:
    digits = datasets.get("digits")

    arrays = load_arrays(digits, Path("/nowhere"))

    assert arrays.x.min() == 0
    assert arrays.x.max() == digits.full_scale == 16


def test_changed_digits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = datasets.get("digits")
    whole = digits.read(Path())
    changed = Arrays(whole.x.copy(), whole.y, whole.n_train)
    changed.x[0, 0, 0, 0] ^= 1
    monkeypatch.setattr(digits, "read", classmethod(lambda cls, root: changed))

    with pytest.raises(DataError, match="Digits"):
        load_arrays(digits, Path("/nowhere"))


@pytest.mark.parametrize("name", datasets.names())
def test_every_data_set_says_what_it_is(name: str) -> None:
    dataset = datasets.get(name)

    assert dataset.name() == name
    assert dataset.sha256 is None or len(dataset.sha256) == 64
    assert len(dataset.shape) == (0 if dataset.by_path else 3)  # a path is needed to know
    assert dataset.title


def images_file(count: int) -> bytes:
    """An idx file of 28x28 images: magic 0x803 (bytes, three dimensions), the dimensions, the pixels."""
    return struct.pack(">4i", 0x803, count, 28, 28) + bytes(i % 256 for i in range(count * 28 * 28))


def labels_file(count: int) -> bytes:
    """An idx file of labels: magic 0x801 (bytes, one dimension), the number, the labels."""
    return struct.pack(">2i", 0x801, count) + bytes(i % 10 for i in range(count))


@pytest.fixture
def mnist_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root in torchvision's layout with a made-up MNIST: three training images and two test images."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 3), ("t10k", 2)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images_file(count))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels_file(count))

    mnist = datasets.get("mnist")
    monkeypatch.setattr(mnist, "archives", classmethod(lambda cls: []))  # no network in tests
    monkeypatch.setattr(mnist, "packages", ())
    return tmp_path


def test_mnist_is_read_from_torchvisions_layout(mnist_root: Path) -> None:
    arrays = datasets.get("mnist").read(mnist_root)

    assert arrays.x.shape == (5, 1, 28, 28)
    assert arrays.x[0, 0, 0, :3].tolist() == [0, 1, 2]
    assert arrays.y.tolist() == [0, 1, 2, 0, 1]  # training part first
    assert arrays.n_train == 3


def test_files_that_are_not_mnist_are_refused(mnist_root: Path) -> None:
    with pytest.raises(DataError, match=r"MNIST in .* is not the data set it should be"):
        load_arrays(datasets.get("mnist"), mnist_root)


@pytest.mark.parametrize("part", ["train", "t10k"])
@pytest.mark.parametrize("file", ["images-idx3-ubyte", "labels-idx1-ubyte"])
@pytest.mark.parametrize("kept", [0, 3, 8, -1], ids=["empty", "in magic", "in header", "last byte"])
def test_truncated_mnist_files_are_damaged(mnist_root: Path, part: str, file: str, kept: int) -> None:
    path = mnist_root / "MNIST" / "raw" / f"{part}-{file}"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(DataError, match=r"MNIST under .* are damaged") as caught:
        load_arrays(datasets.get("mnist"), mnist_root)

    assert "Delete them" in caught.value.hint
    assert not cache_of(datasets.get("mnist"), mnist_root).exists()


@pytest.mark.parametrize(
    "name", ["mnist", "fashion_mnist", "emnist", "cifar10", "cifar100", "cifar100_subset", "svhn", "covtype"]
)
def test_a_data_set_that_is_not_there_is_not_found(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        datasets.get(name).read(tmp_path)


def test_an_empty_mnist_folder_is_missing_rather_than_damaged(mnist_root: Path) -> None:
    for path in (mnist_root / "MNIST" / "raw").iterdir():
        path.unlink()

    assert presence(datasets.get("mnist"), mnist_root) == "missing"
    with pytest.raises(DataError, match="MNIST is not under"):
        load_arrays(datasets.get("mnist"), mnist_root)


def test_mnist_is_read_from_packed_files_too(mnist_root: Path) -> None:
    expected = datasets.get("mnist").read(mnist_root)
    for path in list((mnist_root / "MNIST" / "raw").iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()

    assert datasets.get("mnist").read(mnist_root).sha256() == expected.sha256()


def test_mnist_files_with_more_than_they_say_are_damaged(mnist_root: Path) -> None:
    with (mnist_root / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").open("ab") as file:
        file.write(b"\0")

    assert presence(datasets.get("mnist"), mnist_root) == "damaged"


# --- EMNIST ---

LETTER_L = np.zeros((28, 28), dtype=np.uint8)
LETTER_L[4:24, 6] = 255  # a stroke down the left
LETTER_L[23, 6:20] = 255  # and one to the right at the bottom


def idx(values: np.ndarray) -> bytes:
    """An idx file of bytes: two zeros, 8, the number of dimensions, the dimensions, the values."""
    return struct.pack(f">4B{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.astype(np.uint8).tobytes()


@pytest.fixture
def emnist_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with a made-up EMNIST: in every division three L for training and two blanks for testing."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for split, last in (("byclass", 61), ("bymerge", 46), ("balanced", 46), ("letters", 26), ("digits", 9)):
            lying = np.stack([LETTER_L.T] * 3)  # the files hold columns before rows
            first = 1 if split == "letters" else 0  # and count letters from 1
            for name, values in (
                ("train-images-idx3", lying),
                ("train-labels-idx1", np.array([first, last, first])),
                ("test-images-idx3", np.zeros((2, 28, 28))),
                ("test-labels-idx1", np.array([last, first])),
            ):
                archive.writestr(f"gzip/emnist-{split}-{name}-ubyte.gz", gzip.compress(idx(values)))
    path = tmp_path / "EMNIST" / "raw" / "gzip.zip"
    path.parent.mkdir(parents=True)
    path.write_bytes(packed.getvalue())
    monkeypatch.setattr(torchvision_datasets().EMNIST, "md5", md5(packed.getvalue()))
    return tmp_path


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.mark.parametrize(
    ("name", "title", "classes"),
    [
        ("emnist", "EMNIST byclass", 62),
        ("emnist[split=bymerge]", "EMNIST bymerge", 47),
        ("emnist[split=balanced]", "EMNIST balanced", 47),
        ("emnist[split=letters]", "EMNIST letters", 26),
        ("emnist[split=digits]", "EMNIST digits", 10),
    ],
)
def test_every_division_of_emnist_has_its_classes_counted_from_zero(
    emnist_root: Path, name: str, title: str, classes: int
) -> None:
    emnist = find_dataset(name)

    arrays = load_arrays(emnist, emnist_root)

    assert (emnist.title, emnist.classes) == (title, classes)
    assert arrays.y.tolist() == [0, classes - 1, 0, classes - 1, 0]
    assert arrays.n_train == 3


def test_the_letters_of_emnist_stand_upright(emnist_root: Path) -> None:
    arrays = find_dataset("emnist[split=letters]").read(emnist_root)

    assert arrays.x.shape == (5, 1, 28, 28)
    assert np.array_equal(arrays.x[0, 0], LETTER_L)
    assert not arrays.x[3:].any()  # the test part comes last


def test_the_byclass_division_is_the_default_and_has_one_name() -> None:
    assert find_dataset("emnist[split=byclass]").name() == "emnist"


def test_an_unknown_division_of_emnist_is_refused() -> None:
    with pytest.raises(FedbenchError, match="split"):
        find_dataset("emnist[split=capitals]")


def test_two_divisions_of_emnist_have_two_caches_of_one_archive(emnist_root: Path) -> None:
    for name in ("emnist[split=letters]", "emnist[split=digits]"):
        load_arrays(find_dataset(name), emnist_root)

    caches = [path.name for path in (emnist_root / "fedbench").iterdir() if path.is_dir()]
    assert sorted(caches) == ["emnist[split=digits]", "emnist[split=letters]"]


# --- CIFAR ---


def batch(label_key: str, labels: list[int], first: int) -> bytes:
    """A pickle as Python 2 wrote it: rows of 1024 red, then green, then blue values."""
    red, green, blue = (np.full((len(labels), 1024), first + channel, dtype=np.uint8) for channel in range(3))
    red[:, 1] = 200  # row 0, column 1
    red[:, 32] = 100  # row 1, column 0
    return pickle.dumps({"data": np.hstack([red, green, blue]), label_key: labels}, protocol=2)


CIFAR: dict[str, dict[str, Any]] = {
    "cifar10": {
        "reader": "CIFAR10",
        "folder": "cifar-10-batches-py",
        "archive": "cifar-10-python.tar.gz",
        "train": {f"data_batch_{i}": batch("labels", [i, 9 - i], 10 * i) for i in range(1, 6)},
        "test": {"test_batch": batch("labels", [7], 90)},
        "labels": [1, 8, 2, 7, 3, 6, 4, 5, 5, 4, 7],
    },
    "cifar100": {
        "reader": "CIFAR100",
        "folder": "cifar-100-python",
        "archive": "cifar-100-python.tar.gz",
        "train": {"train": batch("fine_labels", [99, 0], 10)},
        "test": {"test": batch("fine_labels", [42], 90)},
        "labels": [99, 0, 42],
    },
}


@pytest.fixture(params=CIFAR)
def cifar(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[type[Dataset], dict[str, Any]]:
    """A made-up CIFAR of a few images, in files with which torchvision would agree."""
    made = CIFAR[request.param]
    reader = getattr(torchvision_datasets(), made["reader"])
    for part in ("train", "test"):
        monkeypatch.setattr(reader, f"{part}_list", [[name, md5(content)] for name, content in made[part].items()])
    return datasets.get(request.param), made


def lay_out(made: dict[str, Any], root: Path) -> Path:
    folder = root / str(made["folder"])
    folder.mkdir()
    for name, content in {**made["train"], **made["test"]}.items():
        (folder / name).write_bytes(content)
    return folder


def pack(made: dict[str, Any], root: Path) -> None:
    with tarfile.open(root / str(made["archive"]), "w:gz") as archive:
        for name, content in {**made["train"], **made["test"]}.items():
            entry = tarfile.TarInfo(f"{made['folder']}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


@pytest.mark.parametrize("form", ["folder", "archive", "incomplete folder and archive"])
def test_cifar_is_read_from_torchvisions_layout(
    cifar: tuple[type[Dataset], dict[str, Any]], tmp_path: Path, form: str
) -> None:
    dataset, made = cifar
    if "folder" in form:
        folder = lay_out(made, tmp_path)
    if "archive" in form:
        pack(made, tmp_path)
    if "incomplete" in form:
        (folder / next(iter(made["test"]))).unlink()

    arrays = dataset.read(tmp_path)

    assert arrays.y.tolist() == made["labels"]
    assert arrays.n_train == len(made["labels"]) - 1
    assert arrays.x.shape == (len(made["labels"]), 3, 32, 32)
    assert arrays.x[0, :, 5, 5].tolist() == [10, 11, 12]  # red, green, blue
    assert (arrays.x[0, 0, 0, 1], arrays.x[0, 0, 1, 0]) == (200, 100)  # row by row
    assert arrays.x[-1, 2, 0, 0] == 92  # the test part comes last


def test_a_changed_cifar_file_is_not_even_opened(
    cifar: tuple[type[Dataset], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, made = cifar
    folder = lay_out(made, tmp_path)
    name = next(iter(made["train"]))
    (folder / name).write_bytes(made["train"][name] + b"\0")
    opened: list[bytes] = []
    monkeypatch.setattr(pickle, "loads", lambda content, **_: opened.append(content))

    with pytest.raises(DataError, match=f"are damaged: ValueError: {name} has MD5"):
        load_arrays(dataset, tmp_path)

    assert opened == []


def test_the_npm_package_of_cifar10_has_an_image_in_every_row_of_its_pictures() -> None:
    def picture(first: int) -> bytes:
        pixels = np.zeros((2, 1024, 3), dtype=np.uint8)
        pixels[:, :, 0] = first
        pixels[1, 34] = (1, 2, 3)  # row 1, column 2 of the second image
        packed = io.BytesIO()
        Image.fromarray(pixels).save(packed, "png")
        return packed.getvalue()

    names = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"]
    content = {name: picture(10 * number) for number, name in enumerate(names, 1)}
    content |= {"train_lables.json": b"[0,1,2,3,4,5,6,7,8,9]", "test_lables.json": b"[5,6]"}

    arrays = datasets.get("cifar10").read_package(content.__getitem__)

    assert arrays.x.shape == (12, 3, 32, 32)
    assert arrays.x[::2, 0, 0, 0].tolist() == [10, 20, 30, 40, 50, 60]
    assert arrays.x[1, :, 1, 2].tolist() == [1, 2, 3]
    assert arrays.y.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6]
    assert arrays.n_train == 10


def test_the_subset_of_cifar100_says_that_it_is_one(tmp_path: Path) -> None:
    (tmp_path / "cifar-100-subset").mkdir()
    images = np.arange(3 * 32 * 32 * 3, dtype=np.uint8).reshape(3, 32, 32, 3)
    np.savez(
        tmp_path / "cifar-100-subset" / "cifar100_subset.npz",
        x_train=images[:2],
        y_train=np.array([3, 4]),
        x_test=images[2:],
        y_test=np.array([5]),
    )
    subset = datasets.get("cifar100_subset")

    arrays = subset.read(tmp_path)

    assert "subset" in subset.name()
    assert "subset" in subset.title
    assert arrays.x[1, 2, 4, 5] == images[1, 4, 5, 2]
    assert arrays.y.tolist() == [3, 4, 5]
    assert arrays.n_train == 2


# --- SVHN ---


@pytest.fixture
def svhn_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data root with a made-up SVHN: two training images and one test image, [height, width, channel, n]."""
    known = dict(torchvision_datasets().SVHN.split_list)
    for part, labels in (("train", [10, 3]), ("test", [9])):
        x = np.zeros((32, 32, 3, len(labels)), dtype=np.uint8)
        x[4, 5, 2] = labels
        path = tmp_path / f"{part}_32x32.mat"
        savemat(path, {"X": x, "y": np.array(labels, dtype=np.uint8)[:, None]})
        known[part] = [known[part][0], path.name, md5(path.read_bytes())]
    monkeypatch.setattr(torchvision_datasets().SVHN, "split_list", known)
    return tmp_path


def test_svhn_is_read_from_its_two_files(svhn_root: Path) -> None:
    arrays = load_arrays(datasets.get("svhn"), svhn_root)

    assert arrays.x.shape == (3, 3, 32, 32)
    assert arrays.x[:, 2, 4, 5].tolist() == [10, 3, 9]
    assert arrays.x.sum() == 22  # and nothing anywhere else
    assert arrays.y.tolist() == [0, 3, 9]  # the digit 0 is class 10 in the file
    assert arrays.n_train == 2


# --- data sets whose hash nobody knows ---


@pytest.mark.parametrize("name", ["emnist", "cifar100", "svhn"])
def test_a_flipped_bit_in_a_source_file_is_found_although_no_hash_is_pinned(
    name: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "cifar100":
        made = CIFAR[name]
        for part in ("train", "test"):
            known = [[file, md5(content)] for file, content in made[part].items()]
            monkeypatch.setattr(torchvision_datasets().CIFAR100, f"{part}_list", known)
        lay_out(made, tmp_path)
    else:
        request.getfixturevalue(f"{name}_root")
    dataset = datasets.get(name)
    verify(dataset, tmp_path)

    for path in [path for path in tmp_path.rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        changed = bytearray(whole)
        changed[len(whole) // 2] ^= 1
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"are damaged: ValueError: .* has MD5"):
            verify(dataset, tmp_path)
        path.write_bytes(whole)

    verify(dataset, tmp_path)


def test_a_data_error_is_a_fedbench_error() -> None:
    assert issubclass(DataError, FedbenchError)

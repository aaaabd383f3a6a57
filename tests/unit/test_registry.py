"""Plugins by file: the user's own folders, other packages, and what is refused."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedbench.algorithm import methods
from fedbench.dataset import datasets
from fedbench.errors import FedbenchError

METHOD = """
from fedbench.algorithm import Algorithm


class Mine(Algorithm):
    title = "Mine"
"""
DERIVED_METHOD = """
from .fedavg import FedAvg


class Mine(FedAvg):
    title = "Mine"
"""
DATASET = """
from fedbench.dataset import Dataset


class Mine(Dataset):
    title = "Mine"

    @classmethod
    def read(cls, root):
        raise FileNotFoundError(root)
"""

Write = Callable[[str, str], Path]


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes files into a folder that FEDBENCH_PLUGINS names; what is loaded from it is forgotten afterwards."""
    packages = [importlib.import_module(name) for name in ("fedbench.algorithms", "fedbench.datasets")]
    paths = [list(package.__path__) for package in packages]
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.setenv("FEDBENCH_PLUGINS", str(folder))

    def write(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(text)
        importlib.invalidate_caches()
        return path

    yield write
    for package, path in zip(packages, paths, strict=True):
        package.__path__[:] = path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
            for package in packages:
                vars(package).pop(name.rpartition(".")[2], None)
    importlib.invalidate_caches()


# --- what ships ---


def test_the_built_in_plugins_are_the_files_of_their_folders() -> None:
    assert {"fedavg", "fedprox", "local", "pfedbayes"} <= set(methods.names())
    assert {"cifar10", "digits", "fashion_mnist", "mnist"} <= set(datasets.names())


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "local", "pfedbayes"])
def test_a_built_in_method_is_the_class_of_its_file(name: str) -> None:
    assert methods.get(name).__module__ == f"fedbench.algorithms.{name}"


def test_a_class_that_a_file_only_imports_is_not_its_plugin() -> None:
    assert datasets.get("fashion_mnist").__name__ == "FashionMnist"  # the file imports Mnist too


def test_listing_names_imports_no_built_in_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fedbench.datasets.cifar10", raising=False)

    datasets.names()

    assert "fedbench.datasets.cifar10" not in sys.modules


def test_an_unknown_method_gets_a_proposal() -> None:
    with pytest.raises(FedbenchError, match="unknown method 'fedproxx'") as caught:
        methods.get("fedproxx")

    assert "fedprox" in caught.value.hint


def test_an_unknown_data_set_far_from_all_gets_the_whole_list() -> None:
    with pytest.raises(FedbenchError, match="unknown data set 'zzz'") as caught:
        datasets.get("zzz")

    assert caught.value.hint.startswith("Known: ")
    assert all(name in caught.value.hint for name in ("cifar10", "digits", "fashion_mnist", "mnist"))


# --- the user's folder ---


def test_a_file_in_the_folder_is_a_method(plugins: Write) -> None:
    plugins("my_method.py", METHOD)

    assert "my_method" in methods.names()
    assert methods.get("my_method").title == "Mine"


def test_a_method_of_the_folder_may_build_on_a_built_in_one(plugins: Write) -> None:
    plugins("my_method.py", DERIVED_METHOD)

    assert issubclass(methods.get("my_method"), methods.get("fedavg"))


def test_a_method_of_the_folder_may_build_on_another_of_the_folder(plugins: Write) -> None:
    plugins("first.py", METHOD)
    plugins("second.py", "from .first import Mine\n\n\nclass Second(Mine):\n    title = 'Second'\n")

    assert issubclass(methods.get("second"), methods.get("first"))


def test_a_file_in_the_folder_is_a_data_set(plugins: Write) -> None:
    plugins("my_data.py", DATASET)

    assert "my_data" in datasets.names()
    assert datasets.get("my_data").name() == "my_data"


def test_a_method_is_no_data_set_and_a_data_set_no_method(plugins: Write) -> None:
    plugins("my_method.py", METHOD)
    plugins("my_data.py", DATASET)

    assert "my_method" not in datasets.names()
    assert "my_data" not in methods.names()


def test_a_method_with_a_relative_import_does_not_disturb_the_data_sets(plugins: Write) -> None:
    plugins("my_method.py", DERIVED_METHOD)
    plugins("my_data.py", DATASET)

    assert datasets.get("my_data").title == "Mine"
    assert "my_method" not in datasets.names()


def test_a_helper_without_a_plugin_is_passed_over(plugins: Write) -> None:
    plugins("helper.py", "FACTOR = 2\n")
    plugins("my_method.py", "from .helper import FACTOR\n" + METHOD)

    assert "helper" not in methods.names()
    assert "my_method" in methods.names()


def test_a_file_with_an_underscore_is_private_in_the_folder_too(plugins: Write) -> None:
    plugins("_shared.py", METHOD)

    assert "_shared" not in methods.names()


def test_several_folders_are_searched(plugins: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plugins("my_method.py", METHOD).parent
    second = tmp_path / "more"
    second.mkdir()
    (second / "other_method.py").write_text(METHOD)
    monkeypatch.setenv("FEDBENCH_PLUGINS", f"{first}{os.pathsep}{second}")

    assert {"my_method", "other_method"} <= set(methods.names())


def test_a_file_that_is_added_later_is_found(plugins: Write) -> None:
    methods.names()

    plugins("late.py", METHOD)

    assert "late" in methods.names()


def test_plugins_leave_the_built_in_methods_as_they_are(plugins: Write) -> None:
    before = methods.get("fedavg")
    plugins("my_method.py", DERIVED_METHOD)
    methods.names()

    assert methods.get("fedavg") is before


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def broken(:\n", "SyntaxError"),
        ("import no_such_package\n", "No module named 'no_such_package'"),
        ("from .no_such_method import Base\n", "no_such_method"),
        ("1 / 0\n", "ZeroDivisionError"),
    ],
    ids=["syntax", "import", "relative import", "run"],
)
def test_a_broken_file_is_named_with_the_reason(plugins: Write, text: str, reason: str) -> None:
    plugins("broken.py", text)

    with pytest.raises(FedbenchError, match=r"broken\.py does not load") as caught:
        methods.get("my_method")

    assert reason in str(caught.value)


def test_a_broken_file_leaves_the_built_in_methods_usable(plugins: Write) -> None:
    plugins("broken.py", "1 / 0\n")

    assert methods.get("fedavg").title == "FedAvg"


def test_two_plugins_in_one_file_are_refused(plugins: Write) -> None:
    plugins("twins.py", METHOD + "\n\nclass Other(Mine):\n    title = 'Other'\n")

    with pytest.raises(FedbenchError, match="several methods") as caught:
        methods.names()

    assert "twins" in str(caught.value)
    assert "Mine, Other" in str(caught.value)


def test_a_private_class_beside_the_plugin_is_allowed(plugins: Write) -> None:
    plugins("mine.py", METHOD + "\n\nclass _Helper(Mine):\n    title = 'Helper'\n")

    assert methods.get("mine").__name__ == "Mine"


@pytest.mark.parametrize(("registry", "name"), [(methods, "fedavg"), (datasets, "digits")], ids=["method", "data set"])
def test_a_file_with_the_name_of_a_built_in_is_refused(plugins: Write, registry: object, name: str) -> None:
    plugins(f"{name}.py", METHOD)

    with pytest.raises(FedbenchError, match=rf"{name}\.py has the name of a built-in") as caught:
        registry.names()  # type: ignore[attr-defined]

    assert caught.value.hint == "Rename the file."


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "nowhere"
    monkeypatch.setenv("FEDBENCH_PLUGINS", str(missing))

    with pytest.raises(FedbenchError, match="FEDBENCH_PLUGINS names") as caught:
        methods.names()

    assert str(missing) in str(caught.value)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(METHOD)
    monkeypatch.setenv("FEDBENCH_PLUGINS", str(path))

    with pytest.raises(FedbenchError, match="is not a folder"):
        methods.names()


def test_an_empty_variable_means_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDBENCH_PLUGINS", "")

    assert "fedavg" in methods.names()


# --- other packages ---


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a made-up package whose entry point `theirs` is a method."""
    before = set(sys.modules)

    def install(target: str, text: str) -> None:
        site = tmp_path / "site"
        info = site / "theirpackage-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "theirpackage.py").write_text(text)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirpackage\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[fedbench.algorithms]\ntheirs = theirpackage:{target}\n")
        monkeypatch.syspath_prepend(str(site))

    yield install
    for name in set(sys.modules) - before:
        if name == "theirpackage":
            del sys.modules[name]


def test_a_method_of_another_package_is_found_by_its_entry_point(installed: Callable[[str, str], None]) -> None:
    installed("Mine", METHOD)

    assert "theirs" in methods.names()
    assert methods.get("theirs").title == "Mine"


def test_an_entry_point_of_methods_is_no_data_set(installed: Callable[[str, str], None]) -> None:
    installed("Mine", METHOD)

    assert "theirs" not in datasets.names()


def test_an_entry_point_that_is_not_a_method_is_refused(installed: Callable[[str, str], None]) -> None:
    installed("Mine", "Mine = 3\n")

    with pytest.raises(FedbenchError, match="the entry point 'theirs' is not a method"):
        methods.get("theirs")


@pytest.mark.parametrize("text", ["1 / 0\n", "Other = 1\n"], ids=["breaks", "lacks the name"])
def test_an_entry_point_that_does_not_load_is_a_clear_error(installed: Callable[[str, str], None], text: str) -> None:
    installed("Mine", text)

    with pytest.raises(FedbenchError, match="theirs"):
        methods.get("theirs")

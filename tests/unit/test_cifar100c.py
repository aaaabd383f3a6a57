"""CIFAR-100-C: published arrays or generated ones, never mistaken for one another."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fedbench.catalogue import dataset_rows
from fedbench.cli import app
from fedbench.corruptions import CORRUPTIONS, corrupt
from fedbench.dataset import DataError, fetch, find_dataset, load_arrays, presence, verify
from fedbench.errors import FedbenchError
from fedbench.grid import Changes, expand, load_grid
from fedbench.job import build_job
from fedbench.simulation import Surroundings, simulate
from fedbench.split import cut
from fedbench.task import Task

BASE = "synthetic[classes=4,per_class=50,shape=3x8x8]"  # 40 training and 10 test images of every class
SMALL = f"cifar100c[base='{BASE}']"
PUBLISHED = 4  # images at each of the five severities


@pytest.fixture
def publish(monkeypatch, tmp_path):
    """Writes files such as the published ones, of 4 images: a pixel of severity index s is 50 s + its row."""
    monkeypatch.setattr("fedbench.datasets.cifar100c.PUBLISHED_SHAPE", (PUBLISHED, 32, 32, 3))
    folder = tmp_path / "CIFAR-100-C"
    folder.mkdir()
    images = np.zeros((5 * PUBLISHED, 32, 32, 3), dtype=np.uint8)
    images += np.repeat(50 * np.arange(5, dtype=np.uint8), PUBLISHED)[:, None, None, None]
    images += np.arange(32, dtype=np.uint8)[:, None, None]
    labels = np.tile([7, 0, 99, 7], 5)

    def write(**changed):
        contents = {**dict.fromkeys(CORRUPTIONS, images), "labels": labels, **changed}
        for name, content in contents.items():
            np.save(folder / f"{name}.npy", content)
        return folder

    return write


# --- two things under two names ---


def test_published_and_generated_have_different_names_and_titles():
    published, generated = find_dataset("cifar100c"), find_dataset("cifar100c[source=generated]")

    assert (published.name(), published.generated) == ("cifar100c", False)
    assert (generated.name(), generated.generated) == ("cifar100c[source=generated]", True)
    assert "published" in published.title
    assert "generated here from CIFAR-100" in generated.title


def test_a_base_means_that_it_is_generated_and_the_name_says_so():
    assert find_dataset("cifar100c[base=cifar100]").name() == "cifar100c[source=generated]"
    assert find_dataset("cifar100c[base=cifar100_subset]").name() == "cifar100c[base=cifar100_subset,source=generated]"


def test_a_job_on_generated_corruptions_is_another_job():
    settings = {"method": "fedavg", "partition": "corruption", "clients": 10, "s": 100, "model": "lenet"}
    jobs = [build_job({**settings, "dataset": f"cifar100c{which}"}) for which in ("", "[source=generated]")]

    assert jobs[0].key != jobs[1].key
    assert jobs[1].settings["dataset"] == "cifar100c[source=generated]"


def test_groups_are_named_after_the_corruptions():
    dataset = find_dataset("cifar100c")

    assert dataset.groups == 19
    assert dataset.group_names == tuple(CORRUPTIONS)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("cifar100c[base=cifar100,source=published]", "base is for source=generated"),
        ("cifar100c[base=mnist]", "mnist cannot be corrupted"),
        ("cifar100c[base=covtype]", "covtype cannot be corrupted"),
        ("cifar100c[base='synthetic[shape=3x7x32]']", "no colour images of at least 8x8"),
        ("cifar100c[base=nothing]", "unknown data set 'nothing'"),
    ],
)
def test_what_cannot_be_generated_is_refused(name, problem):
    with pytest.raises(FedbenchError, match=problem):
        find_dataset(name)


def test_a_base_without_test_images_is_refused(pictures, tmp_path):
    with pytest.raises(FedbenchError, match="pictures has no test images"):
        load_arrays(find_dataset(f"cifar100c[base={pictures}]"), tmp_path)


# --- generated ---


def test_every_group_is_the_bases_test_images_in_their_order_under_one_corruption(tmp_path):
    base, made = load_arrays(find_dataset(BASE), tmp_path), load_arrays(find_dataset(SMALL), tmp_path)
    images = base.x[160:].transpose(0, 2, 3, 1)

    assert made.x.shape == (19 * 40, 3, 8, 8)
    assert made.n_train == 19 * 40
    assert made.group.tolist() == np.repeat(np.arange(19), 40).tolist()
    for group, name in enumerate(CORRUPTIONS):
        assert made.y[made.group == group].tolist() == base.y[160:].tolist()
        if name in ("brightness", "contrast", "pixelate", "defocus_blur"):  # nothing is drawn
            expected = corrupt(name, images, np.random.default_rng(0)).transpose(0, 3, 1, 2)
            assert np.array_equal(made.x[made.group == group], expected)


def test_it_is_the_same_wherever_it_is_made(tmp_path):
    one, other = (load_arrays(find_dataset(SMALL), tmp_path / name).sha256() for name in "ab")

    assert one == other


def test_corruptions_and_chunks_have_random_numbers_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setattr("fedbench.datasets.cifar100c.CHUNK", 20)
    images = np.full((40, 3, 8, 8), 128, dtype=np.uint8)
    same = type(load_arrays(find_dataset(BASE), tmp_path))(images, np.zeros(40, dtype=np.int64), 0)
    monkeypatch.setattr("fedbench.datasets.cifar100c.load_arrays", lambda dataset, root: same)

    made = find_dataset(SMALL).read(tmp_path)

    noisy = made.x[made.group == 0]  # gaussian_noise
    assert len(made.y) == 19 * 40
    assert (noisy[:20] != noisy[20:]).any(axis=(1, 2, 3)).all()


def test_the_cache_is_used_and_looking_makes_none(tmp_path):
    dataset = find_dataset(SMALL)

    assert presence(dataset, tmp_path) == "missing"
    with pytest.raises(FileNotFoundError):
        verify(dataset, tmp_path)
    assert not any(tmp_path.iterdir())

    fetch(dataset, tmp_path)

    assert presence(dataset, tmp_path) == "present"
    assert verify(dataset, tmp_path) == "hash of the first decoding"
    assert fetch(dataset, tmp_path) == "the cache"


def test_listings_show_what_was_generated(tmp_path):
    load_arrays(find_dataset(SMALL), tmp_path)

    rows = {row["dataset"]: row for row in dataset_rows(tmp_path)}

    assert rows["cifar100c"]["state"] == "missing"
    made = rows[find_dataset(SMALL).name()]
    assert made["state"] == "present"
    assert "generated here" in made["title"]


def test_a_damaged_cache_is_noticed(tmp_path):
    load_arrays(find_dataset(SMALL), tmp_path)
    (cache,) = (tmp_path / "fedbench").glob("cifar100c[[]*")
    pixels = np.load(cache / "x.npy", mmap_mode="r+")
    pixels[100, 0, 3, 3] ^= 1
    pixels.flush()

    with pytest.raises(DataError, match="not the data set it should be"):
        load_arrays(find_dataset(SMALL), tmp_path)


# --- published ---


def test_published_arrays_are_read_at_their_last_severity(publish, tmp_path):
    publish(fog=np.full((5 * PUBLISHED, 32, 32, 3), 9, dtype=np.uint8))

    arrays = load_arrays(find_dataset("cifar100c"), tmp_path)

    assert arrays.x.shape == (19 * PUBLISHED, 3, 32, 32)
    fog = [*CORRUPTIONS].index("fog")
    assert (arrays.x[arrays.group == fog] == 9).all()
    assert (arrays.x[arrays.group == 0][:, :, 5] == 205).all()  # severity index 4, row 5
    assert arrays.y.tolist() == [7, 0, 99, 7] * 19
    assert arrays.n_train == 19 * PUBLISHED


def test_images_keep_their_orientation_and_their_colours(publish, tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (5 * PUBLISHED, 32, 32, 3), dtype=np.uint8)
    publish(snow=images)

    arrays = load_arrays(find_dataset("cifar100c"), tmp_path)

    snow = arrays.x[arrays.group == [*CORRUPTIONS].index("snow")]
    assert snow[1, 2, 10, 20] == images[17, 10, 20, 2]  # the second image of the fifth block


def test_published_arrays_are_not_replaced_by_generated_ones_nor_the_other_way_round(publish, tmp_path):
    made = load_arrays(find_dataset(SMALL), tmp_path).sha256()
    publish()

    assert len(load_arrays(find_dataset("cifar100c"), tmp_path).y) == 19 * PUBLISHED
    assert load_arrays(find_dataset(SMALL), tmp_path).sha256() == made


def test_without_the_published_arrays_nothing_is_generated_in_silence(tmp_path):
    with pytest.raises(DataError, match="is not under") as caught:
        load_arrays(find_dataset("cifar100c"), tmp_path)

    assert "cifar100c[source=generated]" in caught.value.hint
    assert "CIFAR-100-C/" in caught.value.hint
    assert not [*(tmp_path / "fedbench").glob("cifar100c[[]*")]


def test_a_corruption_that_is_missing_makes_the_whole_missing(publish, tmp_path):
    (publish() / "saturate.npy").unlink()

    assert presence(find_dataset("cifar100c"), tmp_path) == "missing"


PIXELS = np.zeros((5 * PUBLISHED, 32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"fog": PIXELS[:-1]}, r"fog.npy has uint8 \(19, 32, 32, 3\)"),
        ({"fog": PIXELS[-PUBLISHED:]}, r"fog.npy has uint8 \(4, 32, 32, 3\)"),
        ({"snow": PIXELS.transpose(0, 3, 1, 2)}, "snow.npy"),
        ({"frost": PIXELS.astype(np.float32)}, "frost.npy has float32"),
        ({"labels": np.zeros(PUBLISHED, dtype=int)}, "labels.npy"),
        ({"labels": np.arange(5 * PUBLISHED)}, "does not repeat the labels"),
        ({"labels": np.zeros(5 * PUBLISHED)}, "not 20 whole numbers"),
        ({"labels": np.full(5 * PUBLISHED, 100)}, "labels 100 to 100"),
    ],
    ids=["short", "one severity", "channels first", "floats", "few labels", "shuffled", "no numbers", "no class"],
)
def test_files_that_are_not_the_published_ones_are_refused(publish, tmp_path, changed, problem):
    publish(**changed)

    with pytest.raises(DataError, match=problem):
        load_arrays(find_dataset("cifar100c"), tmp_path)


@pytest.mark.parametrize("name", ["labels", "jpeg_compression"])
def test_a_truncated_file_is_refused(publish, tmp_path, name):
    path = publish() / f"{name}.npy"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(DataError, match="damaged"):
        load_arrays(find_dataset("cifar100c"), tmp_path)


# --- in jobs ---

CORRUPTED = {"dataset": SMALL, "clean": BASE, "partition": "corruption", "clients": 10, "s": 4, "model": "logreg"}


def test_ten_corruptions_are_trained_on_and_nine_are_for_newcomers(make_job, tmp_path):
    _, arrays, split = cut(make_job(**CORRUPTED), tmp_path)

    owned = [set(arrays.group[np.concatenate(own)]) for own in zip(split.train, split.test, strict=True)]
    assert all(len(kinds) == 1 for kinds in owned)
    assert len(set.union(*owned[:10])) == 10
    assert set.union(*owned[:10]) & set.union(*owned[10:]) == set()
    assert {(len(train), len(test)) for train, test in zip(split.train, split.test, strict=True)} == {(36, 4)}


def test_the_clean_data_is_the_bases_training_part_without_corruption(make_ctx, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path))
    task: Task = make_ctx(**CORRUPTED, normalize="none").task

    clean = task.clean_data()

    base = load_arrays(find_dataset(BASE), tmp_path)
    assert clean.n == 160
    assert np.allclose(clean.x.numpy() * 255, base.x[:160], atol=1e-3)
    assert clean.y.tolist() == base.y[:160].tolist()


def test_a_run_scores_the_three_evaluations_of_fedhb(make_job, recorder, tmp_path):
    job = make_job(**CORRUPTED, rounds=2, eval_every=1, adapt_epochs=[1], lr=0.1)

    assert simulate(job, recorder, Surroundings(tmp_path, data_root=tmp_path)) == "done"

    (trained,) = recorder.evaluations(stage="final", view="gm", split="test", predict="mean")
    (clean,) = recorder.evaluations(stage="final", view="gm", split="clean", predict="mean")
    (adapted,) = recorder.evaluations(stage="adapt", view="pm", split="test", predict="mean")
    assert sorted(client for client in trained.metrics if client is not None) == [*range(10)]
    assert sorted(client for client in adapted.metrics if client is not None) == [*range(10, 19)]
    # 160 images: an accuracy is a number of 160ths
    assert clean.metrics[None]["accuracy"] * 160 == pytest.approx(round(clean.metrics[None]["accuracy"] * 160))


def test_fedhbs_grid_has_the_papers_clients_and_evaluations():
    jobs = expand(load_grid("fedhb_table2"), Changes(methods="fedavg", set=["seed=0"]))

    assert {(job.partition_params["s"], job.protocol.f, job.protocol.tau) for job in jobs} == {
        (s, f, tau) for s in (50, 100) for f in (0.1, 1.0) for tau in (1, 4)
    }
    assert {job.protocol.rounds for job in jobs} == {320, 80}
    for job in jobs:
        assert (job.task.dataset, job.task.clean, job.task.clients) == ("cifar100c", "cifar100", 100)
        assert (job.task.partition, job.partition_params["train_types"]) == ("corruption", 10)
        assert job.partition_params["image_split"] == "independent"


def test_the_grid_runs_on_generated_corruptions_of_the_subset():
    jobs = expand(
        load_grid("fedhb_table2"),
        Changes(methods="fedavg", set=["dataset=cifar100c[base=cifar100_subset]", "image_split=by_image"]),
    )

    assert {(job.task.dataset, job.task.clean) for job in jobs} == {
        ("cifar100c[base=cifar100_subset,source=generated]", "cifar100_subset")
    }
    assert {job.partition_params["image_split"] for job in jobs} == {"by_image"}


def test_the_split_view_knows_it(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDBENCH_DATA", str(tmp_path))
    words = ["datasets", "show", SMALL, "--partition", "corruption[s=4]", "--out", str(tmp_path / "out"), "--json"]

    shown = CliRunner().invoke(app, words, catch_exceptions=False)

    summary = json.loads(shown.stdout)["summary"]
    assert (summary["clients"], summary["newcomers"], summary["train"]) == (10, 9, 19 * 36)

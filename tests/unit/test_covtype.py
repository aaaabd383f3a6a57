"""Covtype from a few rows: where its files may lie, how it is cut and scaled, and what it is checked against."""

import gzip
import lzma

import numpy as np
import pytest

from fedbench.dataset import DataError, find_dataset, load_arrays

ROWS = 50
rng = np.random.default_rng(0)
TABLE = rng.integers(-200, 7000, (ROWS, 54)).astype(np.int16)
TABLE[:, 10] = 3  # constant, as a rare soil type is in the training part
COVER = rng.permutation(np.arange(ROWS) % 7 + 1)


@pytest.fixture
def rows():
    """The table as the UCI repository has it: numbers between commas, the cover type last."""
    lines = [",".join(map(str, [*numbers, cover])) for numbers, cover in zip(TABLE.tolist(), COVER, strict=True)]
    return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def root(tmp_path):
    """A data root with the arrays of the small table."""
    (tmp_path / "covtype").mkdir()
    np.savez(tmp_path / "covtype" / "covtype.npz", X=TABLE, y=COVER.astype(np.int64))
    return tmp_path


def covtype(settings=""):
    return find_dataset(f"covtype{settings}")


def original_rows(arrays):
    """Which row of the table every sample is, by its unscaled numbers."""
    places = {tuple(row): place for place, row in enumerate(TABLE.astype(np.float32).tolist())}
    return [places[tuple(row)] for row in arrays.x[:, 0, 0, :54].tolist()]


# --- files ---


def test_without_files_it_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"covtype\.npz"):
        covtype().read(tmp_path)


@pytest.mark.parametrize(
    ("name", "pack"),
    [("covtype.data", bytes), ("covtype.data.gz", gzip.compress), ("covtype.data.xz", lzma.compress)],
)
def test_the_repositorys_table_is_as_good_as_arrays(root, tmp_path_factory, rows, name, pack):
    other = tmp_path_factory.mktemp("other")
    (other / "covtype").mkdir()
    (other / "covtype" / name).write_bytes(pack(rows))

    assert covtype().read(other).sha256() == covtype().read(root).sha256()


def test_what_scikit_learn_downloads_is_kept_as_arrays(tmp_path, root, monkeypatch):
    asked = {}

    def fetch(**settings):
        asked.update(settings)
        return TABLE.astype(np.float64), COVER.astype(np.int32)

    monkeypatch.setattr("sklearn.datasets.fetch_covtype", fetch)
    target = tmp_path / "new"

    covtype().download(target)

    assert asked["data_home"] == target
    assert asked["shuffle"] is False
    assert covtype().read(target).sha256() == covtype().read(root).sha256()


def test_other_content_is_refused(root):
    with pytest.raises(DataError, match="not the data set it should be"):
        load_arrays(covtype(), root)


# --- content ---


def test_type_2_is_class_0_and_all_others_are_class_1(root):
    arrays = covtype("[standardise=false]").read(root)

    rows_of = original_rows(arrays)
    assert sorted(rows_of) == list(range(ROWS))
    assert arrays.y.tolist() == [int(COVER[row] != 2) for row in rows_of]
    assert arrays.y.dtype == np.int64


def test_four_fifths_are_for_training_in_one_fixed_random_order(root):
    arrays = covtype("[standardise=false]").read(root)

    assert arrays.n_train == 40
    assert original_rows(arrays) == np.random.RandomState(0).permutation(ROWS).tolist()


def test_columns_are_standardised_by_the_training_part(root):
    plain, scaled = covtype("[standardise=false]").read(root), covtype().read(root)

    assert scaled.x.dtype == np.float32
    known = plain.x[:40, 0, 0].astype(np.float64)
    deviation = np.where(known.std(0) > 0, known.std(0), 1)
    expected = (plain.x[:, 0, 0] - known.mean(0)) / deviation
    np.testing.assert_allclose(scaled.x[:, 0, 0], expected, rtol=1e-5, atol=1e-5)
    assert np.array_equal(scaled.x[:, 0, 0, 10], np.zeros(ROWS))


def test_a_constant_column_can_be_added(root):
    plain, longer = covtype().read(root), covtype("[constant=true]").read(root)

    assert covtype("[constant=true]").shape == (1, 1, 55)
    assert np.array_equal(longer.x[..., :54], plain.x)
    assert np.array_equal(longer.x[..., 54], np.ones((ROWS, 1, 1)))


def test_every_variant_is_pinned_to_content_of_its_own():
    settings = ["", "[constant=true]", "[standardise=false]", "[standardise=false,constant=true]"]

    hashes = {covtype(text).sha256 for text in settings}

    assert len(hashes) == 4
    assert all(len(pinned) == 64 for pinned in hashes)


def test_numbers_reach_a_model_as_they_are(root, make_ctx, monkeypatch):
    monkeypatch.setattr("fedbench.split.load_arrays", lambda dataset, where: dataset.read(root))

    ctx = make_ctx(
        dataset="covtype", partition="class_ratio", n_client=4, majority=0.5, normalize="none", model="blr", clients=2
    )

    data, arrays = ctx.task.train_data(0), covtype().read(root)
    assert ctx.task.net.d == 55
    assert np.array_equal(data.x.numpy(), arrays.x[ctx.task.split.train[0]])
    assert sorted(data.y.tolist()) == [0, 0, 1, 1]

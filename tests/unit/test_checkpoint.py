"""Checkpoints: atomic, verified on load, the newest two kept."""

import os
import pickle

import pytest
import torch

from fedbench.checkpoint import load_newest, remove, save


def content(round_):
    """What the loop saves: nested dictionaries of tensors, with numbered clients."""
    return {
        "round": round_,
        "server": {"w": torch.arange(100.0) + round_},
        "clients": {0: {"w": torch.ones(3), "step": torch.tensor(7)}, 5: {}},
        "best": {"gm": {"round": 1, "score": 0.1 + 0.2, "server": {}, "clients": {}}},
    }


def rounds_in(folder):
    return sorted(int(path.stem) for path in folder.glob("*.ckpt"))


def damage(folder, round_, *, flip=None, keep=None):
    path = folder / f"{round_:08d}.ckpt"
    data = bytearray(path.read_bytes())
    if flip is not None:
        data[flip] ^= 1
    path.write_bytes(data[:keep])


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path):
    save(tmp_path, 3, content(3))

    loaded = load_newest(tmp_path, not_after=3)

    assert torch.equal(loaded["server"]["w"], torch.arange(100.0) + 3)
    assert torch.equal(loaded["clients"][0]["step"], torch.tensor(7))
    assert loaded["clients"][0]["step"].dtype == torch.int64
    assert loaded["clients"][5] == {}
    assert loaded["best"]["gm"]["score"] == 0.1 + 0.2
    assert loaded["round"] == 3


def test_the_newest_checkpoint_is_loaded(tmp_path):
    for round_ in (9, 10, 100):  # in the order of numbers, not of letters
        save(tmp_path, round_, content(round_))

    assert load_newest(tmp_path, not_after=1000)["round"] == 100


def test_the_newest_two_are_kept(tmp_path):
    for round_ in (1, 2, 3, 4):
        save(tmp_path, round_, content(round_))

    assert rounds_in(tmp_path) == [3, 4]


def test_a_checkpoint_newer_than_asked_for_is_never_loaded(tmp_path):
    for round_ in (3, 7):
        save(tmp_path, round_, content(round_))

    assert load_newest(tmp_path, not_after=6)["round"] == 3
    assert load_newest(tmp_path, not_after=7)["round"] == 7
    assert load_newest(tmp_path, not_after=2) is None


def test_a_folder_that_is_not_there_holds_no_checkpoint(tmp_path):
    assert load_newest(tmp_path / "nowhere", not_after=10) is None


@pytest.mark.parametrize(
    "how",
    [{"flip": 5}, {"flip": -10}, {"flip": 600}, {"keep": -1}, {"keep": 500}, {"keep": 20}, {"keep": 0}],
    ids=["bit of the digest", "bit near the end", "bit inside", "last byte lost", "cut", "digest cut", "empty"],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, how):
    for round_ in (3, 4):
        save(tmp_path, round_, content(round_))
    damage(tmp_path, 4, **how)

    assert load_newest(tmp_path, not_after=4)["round"] == 3


def test_no_single_bit_and_no_missing_end_goes_unnoticed(tmp_path):
    save(tmp_path, 4, content(4))
    whole = (tmp_path / "00000004.ckpt").read_bytes()

    for place in range(0, len(whole), 97):
        damage(tmp_path, 4, flip=place)
        assert load_newest(tmp_path, not_after=4) is None, f"bit flipped in byte {place}"
        (tmp_path / "00000004.ckpt").write_bytes(whole[:place])
        assert load_newest(tmp_path, not_after=4) is None, f"cut at byte {place}"
        (tmp_path / "00000004.ckpt").write_bytes(whole)

    assert load_newest(tmp_path, not_after=4)["round"] == 4


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Harmful:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "harm"),)

    save(tmp_path, 4, {"round": 4, "server": Harmful()})

    with pytest.raises(pickle.UnpicklingError):
        load_newest(tmp_path, not_after=4)

    assert not (tmp_path / "harm").exists()


def test_other_files_in_the_folder_are_no_checkpoints(tmp_path):
    (tmp_path / "best.ckpt").write_bytes(b"mine")
    save(tmp_path, 4, content(4))

    assert load_newest(tmp_path, not_after=4)["round"] == 4
    assert (tmp_path / "best.ckpt").exists()


def test_a_checkpoint_is_synced_before_it_has_its_name_and_its_name_before_older_ones_go(tmp_path, monkeypatch):
    for round_ in (2, 3):
        save(tmp_path, round_, content(round_))
    seen = []

    def look(descriptor, sync=os.fsync):
        seen.append(rounds_in(tmp_path))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", look)

    save(tmp_path, 4, content(4))

    assert seen == [[2, 3], [2, 3, 4]]
    assert rounds_in(tmp_path) == [3, 4]


def test_when_all_are_damaged_there_is_none(tmp_path):
    for round_ in (3, 4):
        save(tmp_path, round_, content(round_))
        damage(tmp_path, round_, keep=100)

    assert load_newest(tmp_path, not_after=4) is None


def test_a_crash_while_writing_leaves_the_older_checkpoints_whole(tmp_path, monkeypatch):
    for round_ in (3, 4):
        save(tmp_path, round_, content(round_))

    def power_cut(descriptor):
        raise OSError("power cut")

    monkeypatch.setattr(os, "fsync", power_cut)
    with pytest.raises(OSError, match="power cut"):
        save(tmp_path, 5, content(5))

    assert rounds_in(tmp_path) == [3, 4]
    assert load_newest(tmp_path, not_after=5)["round"] == 4


def test_a_checkpoint_can_be_written_after_a_crash_while_writing_it(tmp_path):
    tmp_path.joinpath("00000005.partial").write_bytes(b"half a check")

    save(tmp_path, 5, content(5))

    assert load_newest(tmp_path, not_after=5)["round"] == 5


def test_a_checkpoint_replaces_one_of_the_same_round(tmp_path):
    save(tmp_path, 3, content(3))
    damage(tmp_path, 3, flip=100)

    save(tmp_path, 3, content(3))

    assert load_newest(tmp_path, not_after=3)["round"] == 3


def test_a_checkpoint_survives_beside_newer_ones_of_a_run_whose_records_were_lost(tmp_path):
    # the records reach round 0 only: the run begins anew beside checkpoints that it may not use
    for round_ in (8, 10):
        save(tmp_path, round_, content(round_))

    save(tmp_path, 3, content(3))

    assert load_newest(tmp_path, not_after=3)["round"] == 3


def test_removing_a_folder_removes_its_checkpoints(tmp_path):
    save(tmp_path / "job", 3, content(3))

    remove(tmp_path / "job")
    remove(tmp_path / "job")  # nothing to do is no mistake

    assert load_newest(tmp_path / "job", not_after=3) is None

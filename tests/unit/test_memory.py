"""What clients keep between rounds: in RAM up to a budget, then on disk, and nobody can tell the difference."""

import os
import tempfile
import weakref
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench import checkpoint
from fedbench.algorithm import methods
from fedbench.memory import ClientStore, is_whole, remove_unlisted
from fedbench.simulation import Surroundings, simulate

FLOATS = 5
"""Numbers in a memory of these tests, unless they say otherwise: 20 bytes."""


def memory(value, length=FLOATS):
    return {"w": torch.full((length,), float(value))}


def first_memory(client):
    """What a client has that has never trained: -1 for client 0, -2 for client 1, ..."""
    return memory(-1 - client)


def value_of(state):
    (value,) = state["w"].unique().tolist()
    return value


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "memories"


@pytest.fixture
def store(folder):
    """A store with room for two memories in RAM."""
    return ClientStore(first_memory, folder, budget=2 * 4 * FLOATS)


def versions_in(folder):
    """Client and version of every memory on disk."""
    return sorted(tuple(int(part) for part in path.stem.split("-")[1:]) for path in folder.glob("client-*.pt"))


def file_of(folder, client, version):
    (path,) = folder.glob(f"client-{client}-{version}.pt")
    return path


# --- put and get ---


def test_a_client_that_never_trained_has_its_first_memory(store):
    assert value_of(store[3]) == -4


def test_first_use_stores_nothing(store, folder):
    for client in range(100):
        store[client]

    assert len(store) == 0
    assert store.ram_bytes == 0
    assert not folder.exists()


def test_a_client_has_what_was_put_last(store):
    store.put(3, memory(1), 1)
    store.put(3, memory(2), 2)

    assert value_of(store[3]) == 2
    assert len(store) == 1


def test_a_memory_in_ram_is_the_very_object_that_was_put(store):
    kept = memory(1)

    store.put(0, kept, 1)

    assert store[0] is kept


def test_a_store_without_a_folder_keeps_everything_in_ram():
    store = ClientStore(first_memory, budget=1)

    for client in range(3):
        store.put(client, memory(client), 1)

    assert store.ram_bytes == 3 * 20
    assert [value_of(store[client]) for client in range(3)] == [0, 1, 2]


# --- the budget ---


def test_nothing_goes_to_disk_within_the_budget(store, folder):
    store.put(0, memory(0), 1)
    store.put(1, memory(1), 1)

    assert store.ram_bytes == 40
    assert not folder.exists()


def test_a_replaced_memory_makes_room_for_its_successor(store, folder):
    for version in range(1, 10):
        store.put(0, memory(version), version)

    assert store.ram_bytes == 20
    assert not folder.exists()


def test_beyond_the_budget_the_memory_that_was_put_first_goes_to_disk(store, folder):
    for client in (7, 8, 9):
        store.put(client, memory(client), 1)

    assert versions_in(folder) == [(7, 1)]
    assert store.ram_bytes == 40


def test_a_memory_that_was_used_stays_and_the_least_recently_used_goes(store, folder):
    store.put(7, memory(7), 1)
    store.put(8, memory(8), 1)
    store[7]
    store.put(9, memory(9), 1)

    assert versions_in(folder) == [(8, 1)]


def test_as_many_go_to_disk_as_the_new_memory_needs(store, folder):
    store.put(7, memory(7), 1)
    store.put(8, memory(8), 1)
    store.put(9, memory(9, length=10), 1)  # 40 bytes: all of the budget

    assert versions_in(folder) == [(7, 1), (8, 1)]
    assert store.ram_bytes == 40


def test_the_newest_memory_stays_in_ram_even_if_it_alone_is_above_the_budget(store, folder):
    store.put(7, memory(7), 1)
    store.put(8, memory(8, length=100), 1)

    assert versions_in(folder) == [(7, 1)]
    assert store.ram_bytes == 400


def test_a_memory_comes_back_from_disk_with_its_keys_shapes_and_types(folder):
    store = ClientStore(first_memory, folder, budget=1)
    kept = {"w": torch.randn(2, 3), "n": torch.tensor(7), "flag": torch.tensor([True]), "none": torch.zeros(0)}

    store.put(0, kept, 1)
    store.put(1, memory(1), 1)

    assert versions_in(folder) == [(0, 1)]
    back = store[0]
    assert list(back) == ["w", "n", "flag", "none"]
    assert all(torch.equal(back[key], kept[key]) and back[key].dtype == kept[key].dtype for key in kept)


def test_what_goes_to_disk_leaves_ram(store):
    given_away = memory(0)
    watched = weakref.ref(given_away["w"])

    store.put(0, given_away, 1)
    del given_away
    assert watched() is not None
    for client in (1, 2):
        store.put(client, memory(client), 1)

    assert watched() is None


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux to tell how much memory is in use")
def test_a_memory_on_disk_is_mapped_and_not_read(folder):
    def in_use():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    store = ClientStore(first_memory, folder, budget=1)
    store.put(0, memory(0, length=8 << 20), 1)  # 32 MB
    store.put(1, memory(1), 1)

    before = in_use()
    state = store[0]
    after = in_use()

    assert state["w"].numel() == 8 << 20
    assert after - before < 8 << 20


def test_a_failed_write_leaves_no_file_and_loses_no_memory(store, folder, monkeypatch):
    def power_cut(descriptor):
        raise OSError("power cut")

    store.put(7, memory(7), 1)
    store.put(8, memory(8), 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", power_cut)
        with pytest.raises(OSError, match="power cut"):
            store.put(9, memory(9), 1)

    assert versions_in(folder) == []
    assert [value_of(store[client]) for client in (7, 8, 9)] == [7, 8, 9]


operations = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(0, FLOATS)),
        st.tuples(st.just("get"), st.integers(0, 3), st.none()),
        st.tuples(st.just("keep"), st.sampled_from(["gm", "pm"]), st.none()),
        st.tuples(st.just("save"), st.none(), st.none()),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=60)
@given(operations, st.integers(4 * FLOATS, 12 * FLOATS))
def test_whatever_happens_ram_stays_within_the_budget(operations, budget):
    versions, alive = count(1), []
    with tempfile.TemporaryDirectory() as name:
        store = ClientStore(first_memory, Path(name), budget=budget)
        for what, where, length in operations:
            if what == "put":
                put = memory(0, length)
                alive.append(weakref.ref(put["w"]))
                store.put(where, put, next(versions))
                del put
            elif what == "get":
                store[where]
            elif what == "keep":
                store.keep(where)
            else:
                store.save()

            # counted by those who know: the tensors that still exist
            in_ram = sum(4 * watched().numel() for watched in alive if watched() is not None)
            assert store.ram_bytes == in_ram <= budget


@settings(deadline=None, max_examples=60)
@given(operations, st.sampled_from([1, 4 * FLOATS, 8 * FLOATS]))
def test_whatever_was_spilled_a_store_is_a_plain_dictionary(operations, budget):
    versions, now, kept = count(1), {}, {}
    with tempfile.TemporaryDirectory() as name:
        store = ClientStore(first_memory, Path(name), budget=budget)
        for what, where, length in operations:
            if what == "put":
                now[where] = torch.full((length,), float(version := next(versions))).tolist()
                store.put(where, memory(version, length), version)
            elif what == "keep":
                kept[where] = dict(now)
                store.keep(where)
            elif what == "save":
                store.save()

            for expected, found in [(now, store), *((kept[view], store.kept(view)) for view in kept)]:
                assert len(found) == len(expected)
                for client in range(4):
                    default = [-1.0 - client] * FLOATS
                    assert found[client]["w"].tolist() == expected.get(client, default)


@settings(deadline=None, max_examples=40)
@given(operations, operations)
def test_a_restored_store_goes_on_like_the_one_that_was_saved(before, after):
    versions, now, kept = count(1), {}, {}
    with tempfile.TemporaryDirectory() as name:
        store = ClientStore(first_memory, Path(name), budget=8 * FLOATS)
        for operation in [*before, ("restart", None, None), *after]:
            what, where, length = operation
            if what == "put":
                now[where] = torch.full((length,), float(version := next(versions))).tolist()
                store.put(where, memory(version, length), version)
            elif what == "keep":
                kept[where] = dict(now)
                store.keep(where)
            elif what == "restart":
                listings = store.save()
                store = ClientStore(first_memory, Path(name), budget=8 * FLOATS)
                store.restore(listings)
                remove_unlisted(Path(name), [listings])

        for expected, found in [(now, store), *((kept[view], store.kept(view)) for view in kept)]:
            assert {client: found[client]["w"].tolist() for client in expected} == expected
        assert store.ram_bytes <= 8 * 4 * FLOATS


# --- snapshots ---


def test_what_was_kept_stays_as_it_was(store):
    store.put(0, memory(1), 1)
    store.keep("gm")
    store.put(0, memory(2), 2)
    store.put(1, memory(3), 2)

    assert value_of(store.kept("gm")[0]) == 1
    assert value_of(store.kept("gm")[1]) == -2  # had none then
    assert value_of(store[0]) == 2


def test_keeping_again_under_a_name_replaces_what_it_held(store):
    for version in (1, 2, 3):
        store.put(0, memory(version), version)
        if version < 3:
            store.keep("gm")

    assert value_of(store.kept("gm")[0]) == 2


def test_names_keep_different_rounds(store):
    store.put(0, memory(1), 1)
    store.keep("gm")
    store.put(0, memory(2), 2)
    store.keep("pm")
    store.put(0, memory(3), 3)

    assert [value_of(store.kept(name)[0]) for name in ("gm", "pm")] == [1, 2]


def test_keeping_costs_references_only(store):
    store.put(0, memory(1), 1)

    store.keep("gm")
    store.keep("pm")

    assert store.ram_bytes == 20


def test_what_a_name_held_before_is_forgotten(store):
    store.put(0, memory(1), 1)
    store.keep("gm")
    store.put(0, memory(2), 2)
    assert store.ram_bytes == 40

    store.keep("gm")

    assert store.ram_bytes == 20


def test_kept_memories_go_to_disk_as_well(store, folder):
    store.put(0, memory(1), 1)
    store.keep("gm")
    for version in (2, 3):
        store.put(0, memory(version), version)
        store.put(1, memory(version), version)

    assert versions_in(folder) == [(0, 1)]
    assert value_of(store.kept("gm")[0]) == 1


def test_a_name_under_which_nothing_was_kept_is_a_mistake(store):
    with pytest.raises(KeyError):
        store.kept("gm")


# --- saving and restoring ---


def snapshot(folder):
    """Every file with its identity and its time of change."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_saving_writes_every_memory_once(store, folder):
    for client in range(3):
        store.put(client, memory(client), 1)
    store.keep("gm")
    store.put(1, memory(5), 2)

    listings = store.save()

    assert versions_in(folder) == [(0, 1), (1, 1), (1, 2), (2, 1)]
    assert {name: {client: version for client, (version, _) in one.items()} for name, one in listings.items()} == {
        "": {0: 1, 1: 2, 2: 1},
        "gm": {0: 1, 1: 1, 2: 1},
    }


def test_saving_again_writes_only_what_changed(store, folder):
    for client in range(4):
        store.put(client, memory(client), 1)
    store.save()
    before = snapshot(folder)

    store.put(2, memory(9), 2)
    store.save()

    after = snapshot(folder)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 1
    assert (2, 2) in versions_in(folder)


def test_saving_twice_says_the_same_and_writes_nothing(store, folder):
    for client in range(4):
        store.put(client, memory(client), 1)
    listings, before = store.save(), snapshot(folder)

    again = store.save()

    assert again == listings
    assert snapshot(folder) == before


def test_saving_empties_no_ram(store):
    kept = memory(0)
    store.put(0, kept, 1)

    store.save()

    assert store[0] is kept
    assert store.ram_bytes == 20


def test_what_is_saved_is_not_written_again_when_it_leaves_ram(store, folder):
    store.put(0, memory(0), 1)
    store.save()
    before = snapshot(folder)

    store.put(1, memory(1), 2)
    store.put(2, memory(2), 2)

    assert snapshot(folder) == before
    assert value_of(store[0]) == 0


def test_a_restored_store_has_all_memories_and_all_that_was_kept(store, folder):
    store.put(0, memory(1), 1)
    store.keep("gm")
    store.put(0, memory(2), 2)
    store.put(1, memory(3), 2)
    listings = store.save()

    other = ClientStore(first_memory, folder, budget=1000)
    other.restore(listings)

    assert [value_of(other[client]) for client in range(3)] == [2, 3, -3]
    assert [value_of(other.kept("gm")[client]) for client in range(3)] == [1, -2, -3]
    assert len(other) == 2


def test_restoring_leaves_the_memories_on_disk(store, folder):
    for client in range(4):
        store.put(client, memory(client), 1)
    listings = store.save()

    other = ClientStore(first_memory, folder, budget=1000)
    other.restore(listings)

    assert other.ram_bytes == 0


def test_going_back_forgets_what_came_after(store):
    store.put(0, memory(1), 1)
    listings = store.save()
    store.put(0, memory(2), 2)
    store.put(1, memory(3), 2)

    store.restore(listings)

    assert value_of(store[0]) == 1
    assert len(store) == 1
    assert store.ram_bytes == 0  # nothing that can still be asked for is in RAM


def test_what_was_forgotten_by_going_back_takes_no_room(store, folder):
    store.put(0, memory(1), 1)
    listings = store.save()
    store.put(0, memory(2), 2)
    store.put(1, memory(3), 2)

    store.restore(listings)
    for client in (7, 8, 9):
        store.put(client, memory(client), 2)

    # room for two: the first of the three went to disk, beside what was saved
    assert versions_in(folder) == [(0, 1), (7, 2)]
    assert store.ram_bytes == 40


def test_listings_survive_a_checkpoint(store, folder):
    store.put(0, memory(1), 1)
    store.keep("gm")
    listings = store.save()

    checkpoint.save(folder, 1, {"round": 1, "clients": listings})

    assert checkpoint.load_newest(folder, 1)["clients"] == listings


# --- damage ---


@pytest.fixture
def saved(store, folder):
    """Two clients at round 2, of which round 1 is kept; what a checkpoint says of them."""
    for client in (0, 1):
        store.put(client, memory(client), 1)
    store.keep("gm")
    store.put(0, memory(5), 2)
    return store.save()


def test_files_as_they_were_written_are_whole(saved, folder):
    assert is_whole(folder, saved)


def flip(at):
    def damage(path):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:100]),
        lambda path: path.write_bytes(path.read_bytes() + b"\0"),
        flip(0),
        flip(-1),
        flip(500),
    ],
    ids=["missing", "empty", "last byte lost", "cut", "too long", "first bit", "last bit", "bit inside"],
)
@pytest.mark.parametrize(("client", "version"), [(0, 2), (1, 1), (0, 1)], ids=["now", "now and kept", "kept only"])
def test_a_damaged_file_is_noticed(saved, folder, damage, client, version):
    damage(file_of(folder, client, version))

    assert not is_whole(folder, saved)


def test_a_file_in_the_place_of_another_is_noticed(saved, folder):
    file_of(folder, 1, 1).replace(file_of(folder, 0, 2))

    assert not is_whole(folder, saved)


def test_no_memories_are_whole_without_a_folder(folder):
    assert is_whole(folder, {"": {}, "gm": {}})


# --- tidying up ---


def test_files_that_no_checkpoint_names_are_removed(store, folder):
    listings = []
    for version in (1, 2, 3):
        store.put(0, memory(version), version)
        listings.append(store.save())
    store.keep("gm")
    (folder / "client-0-4.pt.partial").write_bytes(b"half a mem")

    remove_unlisted(folder, listings[1:])

    assert versions_in(folder) == [(0, 2), (0, 3)]
    assert sorted(path.name for path in folder.iterdir()) == ["client-0-2.pt", "client-0-3.pt"]


def test_what_a_checkpoint_keeps_by_name_is_not_removed(store, folder):
    store.put(0, memory(1), 1)
    store.keep("gm")
    store.put(0, memory(2), 2)

    remove_unlisted(folder, [store.save()])

    assert versions_in(folder) == [(0, 1), (0, 2)]


def test_checkpoints_are_not_taken_for_memories(store, folder):
    store.put(0, memory(1), 1)
    listings = store.save()
    checkpoint.save(folder, 1, {"round": 1, "clients": listings})

    remove_unlisted(folder, [])

    assert [path.name for path in folder.iterdir()] == ["00000001.ckpt"]


# --- clients without memory ---


def test_clients_without_memory_cost_nothing(folder):
    store = ClientStore(lambda client: {}, folder, budget=1)

    for client in range(1000):
        store.put(client, {}, 1)
    store.keep("gm")

    assert len(store) == 0
    assert store.save() == {"": {}, "gm": {}}
    assert not folder.exists()


def test_a_client_may_give_up_its_memory(store):
    store.put(0, memory(1), 1)
    store.put(0, {}, 2)

    assert store[0] == {}
    assert store.ram_bytes == 0


def test_a_memory_that_was_given_up_stays_so_after_a_restart(store, folder):
    store.put(0, memory(1), 1)
    store.put(0, {}, 2)
    listings = store.save()

    other = ClientStore(first_memory, folder)
    other.restore(listings)

    assert other[0] == {}


# --- whole runs ---


@pytest.fixture
def job(make_job):
    """Four clients, two of which train in a round; the best state of either view is kept."""
    return make_job(
        "pfedbayes", clients=4, f=0.5, train_all=False, rounds=5, rule="best_all", lr=0.01, local_unit="batch", tau=3
    )


@pytest.fixture
def states(monkeypatch):
    """All that clients of pFedBayes send and keep, bit for bit, in order."""
    cls, seen = methods.get("pfedbayes"), []
    update = cls.update

    def traced(self, down, memory, data, ctx):
        message, kept = update(self, down, memory, data, ctx)
        bits = [{key: value.numpy().tobytes() for key, value in state.items()} for state in (message, kept)]
        seen.append((ctx.round, ctx.client, *bits))
        return message, kept

    monkeypatch.setattr(cls, "update", traced)
    return seen


def measured(recorder):
    """All that a run recorded but its seconds."""
    return [
        (record.round, list(record.evaluations), [(c.phase, c.count, c.bytes_down, c.bytes_up) for c in record.costs])
        for record in recorder.kept.values()
    ]


def stop_after(rounds):
    """True from the call that comes after so many rounds on."""
    asked = count()
    return lambda: next(asked) >= rounds


def test_a_run_whose_memories_live_on_disk_is_one_in_ram_bit_for_bit(job, new_recorder, states, tmp_path):
    in_ram, on_disk = new_recorder(), new_recorder()

    simulate(job, in_ram, Surroundings(tmp_path / "ram"))
    seen = [states.pop(0) for _ in range(10)]  # 5 rounds of 2 clients
    simulate(job, on_disk, Surroundings(tmp_path / "disk", memory_budget=1))

    assert versions_in(tmp_path / "ram") == []
    assert len(versions_in(tmp_path / "disk")) == 9  # all but the last that was made
    assert states == seen
    assert measured(on_disk) == measured(in_ram)


@pytest.mark.parametrize("stopped", [1, 3])
@pytest.mark.parametrize("checkpoint_seconds", [0.0, 3600.0], ids=["saved every round", "saved when stopped"])
def test_a_run_on_disk_that_was_interrupted_is_one_in_ram_bit_for_bit(
    job, new_recorder, states, tmp_path, stopped, checkpoint_seconds
):
    whole, halved = new_recorder(), new_recorder()
    simulate(job, whole, Surroundings(tmp_path / "whole"))
    seen = [states.pop(0) for _ in range(10)]
    tight = {"memory_budget": 1, "checkpoint_seconds": checkpoint_seconds}

    simulate(job, halved, Surroundings(tmp_path / "halved", should_stop=stop_after(stopped), **tight))
    outcome = simulate(job, halved, Surroundings(tmp_path / "halved", **tight))

    assert outcome == "done"
    assert halved.rewinds == [0, stopped]
    assert states == seen
    assert measured(halved) == measured(whole)


@pytest.mark.parametrize("budget", [1, 1 << 30], ids=["on disk", "in RAM"])
def test_a_stopped_run_leaves_the_files_that_its_checkpoints_need_and_no_others(make_job, recorder, tmp_path, budget):
    job = make_job("pfedbayes", clients=4, rounds=9, eval_every=3, lr=0.01, local_unit="batch", tau=1)
    place = Surroundings(tmp_path, memory_budget=budget, checkpoint_seconds=0.0, should_stop=stop_after(7))

    simulate(job, recorder, place)

    checkpoints = checkpoint.load_all(tmp_path)
    needed = {
        (client, version)
        for content in checkpoints
        for listing in content["clients"].values()
        for client, (version, _) in listing.items()
    }
    # of 4 clients: rounds 6 and 7 for the two checkpoints, and one of the rounds that were scored, 3 and 6, as the best
    assert [content["round"] for content in checkpoints] == [6, 7]
    assert set(checkpoints[-1]["clients"]) == {"", "gm", "pm"}
    assert {version for _, version in needed} <= {3, 6, 7}
    assert set(versions_in(tmp_path)) == needed
    assert len(list(tmp_path.iterdir())) == len(needed) + 2


def test_a_run_goes_on_from_an_older_checkpoint_when_a_memory_of_the_newest_is_damaged(job, new_recorder, tmp_path):
    whole, halved = new_recorder(), new_recorder()
    simulate(job, whole, Surroundings(tmp_path / "whole"))
    folder = tmp_path / "halved"
    simulate(job, halved, Surroundings(folder, checkpoint_seconds=0.0, should_stop=stop_after(3)))
    (damaged, _) = [path for path in sorted(folder.glob("client-*")) if path.stem.endswith("-3")]
    flip(1000)(damaged)

    simulate(job, halved, Surroundings(folder))

    assert halved.rewinds == [0, 2]
    assert measured(halved) == measured(whole)


def test_a_run_begins_anew_when_no_checkpoint_has_all_its_memories(job, new_recorder, tmp_path):
    whole, halved = new_recorder(), new_recorder()
    simulate(job, whole, Surroundings(tmp_path / "whole"))
    folder = tmp_path / "halved"
    simulate(job, halved, Surroundings(folder, should_stop=stop_after(3)))
    for path in folder.glob("client-*"):
        path.unlink()

    simulate(job, halved, Surroundings(folder))

    assert halved.rewinds == [0, 0]
    assert measured(halved) == measured(whole)


def test_a_method_without_client_memories_writes_checkpoints_only(make_job, recorder, tmp_path):
    place = Surroundings(tmp_path, memory_budget=1, checkpoint_seconds=0.0, should_stop=stop_after(2))

    simulate(make_job("fedavg", rounds=3), recorder, place)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000001.ckpt", "00000002.ckpt"]

"""What every method must do, whatever it computes. A file in algorithms/ is tested here without further ado."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedbench.algorithm import Algorithm, Ctx, Params, methods
from fedbench.evaluation import Standing
from fedbench.job import JobSpec, Protocol, TaskSpec, build_job
from fedbench.wire import on_wire


def measured(recorder):
    """All that a run recorded but its seconds."""
    return [
        (record.round, list(record.evaluations), [(c.phase, c.count, c.bytes_down, c.bytes_up) for c in record.costs])
        for record in recorder.kept.values()
    ]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# --- what it says of itself ---


def test_it_is_a_method_with_a_title_and_a_version(method):
    cls = methods.get(method)

    assert issubclass(cls, Algorithm)
    assert cls.title.strip()
    assert isinstance(cls.version, int)
    assert cls.version >= 1


def test_every_hyperparameter_has_a_description_and_a_default(method):
    fields = methods.get(method).Params.model_fields

    assert issubclass(methods.get(method).Params, Params)
    assert [name for name, info in fields.items() if not info.description] == []
    assert [name for name, info in fields.items() if info.is_required()] == []


def test_its_settings_collide_with_none_of_the_engine(method):
    job = build_job({"method": method, "dataset": "digits"})

    sections = (job.task.model_dump(), job.partition_params, job.protocol.model_dump(), job.params)
    # each of them, the method's name and the seed
    assert len(job.settings) == sum(len(section) for section in sections) + 2


def test_its_defaults_are_settings_of_the_engine(method):
    job = build_job({"method": method, "dataset": "digits"})
    defaults = dict(methods.get(method).defaults)

    assert defaults.keys() <= Protocol.model_fields.keys() | TaskSpec.model_fields.keys()
    assert {name: job.settings[name] for name in defaults} == defaults


def test_its_job_survives_a_round_trip_through_json(short_job):
    job = short_job()

    again = JobSpec.model_validate_json(job.model_dump_json())

    assert again == job
    assert again.key == job.key


# --- states and messages ---


@pytest.fixture
def watched_run(begin, train, witness):
    """Two rounds and an evaluation of every view and mode, with a witness."""
    algorithm, ctx, progress = begin()
    seen = witness(algorithm)
    progress.server = algorithm.init_server(ctx)
    train(algorithm, ctx, progress, 2)
    for view in ("gm", "pm"):
        for mode in ("mean", "mc"):
            Standing(algorithm, progress.server, progress.clients, ctx).evaluate(view, mode)
    sends = set() if algorithm.pooled else {"download"}
    assert {"init_server", "select", "update", "aggregate", "predict"} | sends <= seen.called
    return seen


def test_states_and_messages_are_dictionaries_of_tensors(watched_run):
    for where, state in watched_run.states:
        if state is None:
            assert where.split(":")[0] in ("poll", "global_model", "personal_model"), where
            continue
        assert type(state) is dict, where
        for key, value in state.items():
            assert isinstance(key, str), where
            assert isinstance(value, Tensor), f"{where}.{key}"
            assert not value.requires_grad, f"{where}.{key}"


def test_hooks_do_not_change_what_they_are_given(watched_run):
    assert watched_run.changed == []


def test_what_a_hook_returned_is_never_changed_later(watched_run):
    assert watched_run.aliased() == []


def test_a_cohort_reports_only_who_trains_and_is_sorted(watched_run):
    for cohort in watched_run.cohorts:
        assert set(cohort.report) <= set(cohort.train) <= set(range(4))
        for clients in (cohort.train, cohort.report):
            assert list(clients) == sorted(set(clients))


def test_training_leaves_the_task_as_it_was(begin, train):
    algorithm, ctx, progress = begin()
    task = ctx.task
    before = task.initial.clone(), task.train_data(0).x, task.train_data(0).y, task.split.sha256()

    train(algorithm, ctx, progress, 2)

    assert torch.equal(task.initial, before[0])
    assert torch.equal(task.train_data(0).x, before[1])
    assert torch.equal(task.train_data(0).y, before[2])
    assert task.split.sha256() == before[3]


# --- predictions ---


def test_it_has_a_global_or_a_personal_model(begin):
    algorithm, ctx, progress = begin()

    views = [
        Standing(algorithm, progress.server, progress.clients, ctx).evaluate(view, "mean") for view in ("gm", "pm")
    ]

    assert any(view is not None for view in views)


@pytest.mark.parametrize("mode", ["mean", "mc"])
def test_predictions_are_probabilities_also_for_clients_that_never_took_part(begin, train, world, mode):
    algorithm, ctx, progress = begin(**world, tau=1)
    train(algorithm, ctx, progress, 1)

    predictions = []
    for where in (ctx.at(client) for client in range(4)):
        of_client = progress.server, progress.clients[where.client], ctx.task.train_data(where.client), where
        for model in (algorithm.global_model(*of_client), algorithm.personal_model(*of_client, 0)):
            if model is not None:
                with torch.no_grad():
                    predictions.append(algorithm.predict(model, ctx.task.test_data(where.client).x, where, mode))

    for rows in predictions:
        assert rows.shape == (ctx.task.test_sizes((0,))[0], 10)
        assert rows.min() >= 0
        assert rows.max() <= 1 + 1e-6
        torch.testing.assert_close(rows.sum(-1), torch.ones(len(rows)), rtol=0, atol=1e-5)
    assert len(predictions) >= 4


@pytest.mark.parametrize("mode", ["mean", "mc"])
def test_predictions_are_probabilities_for_any_input(begin, train, mode):
    """Blank images, and images so bright that one logit is 1e8 above the others."""
    algorithm, ctx, progress = begin()
    train(algorithm, ctx, progress, 1)
    standing, here = Standing(algorithm, progress.server, progress.clients, ctx), ctx.at(0)
    images = ctx.task.test_data(0).x[:8]
    models = [model for view in ("gm", "pm") if (model := standing.model_of(view)(0)) is not None]

    @settings(max_examples=15, derandomize=True, deadline=None)
    @given(st.sampled_from(models), st.floats(-30, 8), st.booleans())
    def check(model, exponent, negative):
        rows = algorithm.predict(model, images * (-1 if negative else 1) * 10.0**exponent, here, mode)
        assert bool(rows.isfinite().all())
        assert 0 <= rows.min().item() <= rows.max().item() <= 1 + 1e-5
        torch.testing.assert_close(rows.double().sum(-1), torch.ones(len(rows)).double(), rtol=0, atol=1e-5)

    with torch.no_grad():
        check()


# --- randomness ---


def test_two_runs_are_the_same_bit_for_bit(run, short_job):
    torch.manual_seed(1)
    one, states_of_one = run(short_job())
    torch.manual_seed(2)
    other, states_of_other = run(short_job())

    assert measured(one) == measured(other)
    assert states_of_one.entries == states_of_other.entries


def test_another_seed_is_another_run(run, short_job):
    _, one = run(short_job(seed=0))
    _, other = run(short_job(seed=1))

    assert one.entries != other.entries


def test_nothing_is_drawn_from_a_global_generator(begin, train):
    algorithm, ctx, progress = begin()
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()

    train(algorithm, ctx, progress, 2)
    for view in ("gm", "pm"):
        for mode in ("mean", "mc"):
            Standing(algorithm, progress.server, progress.clients, ctx).evaluate(view, mode)

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


def test_initial_states_do_not_depend_on_what_the_network_holds(begin, world):
    algorithm, ctx, _ = begin(**world)

    def initial():
        states = algorithm.init_server(ctx), algorithm.init_client(ctx.at(1))
        return [{key: value.clone() for key, value in state.items()} for state in states]

    before = initial()
    ctx.task.net.load(torch.full_like(ctx.task.initial, 0.5))  # as another client's training leaves it
    after = initial()

    assert same(after[0], before[0])
    assert same(after[1], before[1])


def test_the_order_of_the_clients_does_not_matter(begin, train, world):
    algorithm, ctx, progress = begin(**world)
    train(algorithm, ctx, progress, 1)
    now = Ctx(ctx.task, ctx.protocol, ctx.seed, round=2)

    def updates(order):
        found = {}
        for client in order:
            where, memory, data = now.at(client), progress.clients[client], ctx.task.train_data(client)
            down = on_wire(algorithm.download(progress.server, where))
            if algorithm.polls():
                algorithm.poll(down, memory, data, where)
            found[client] = algorithm.update(down, memory, data, where)
        return found

    forwards, backwards = updates(range(4)), updates(reversed(range(4)))

    for client in range(4):
        for one, other in zip(forwards[client], backwards[client], strict=True):
            assert same(one, other), f"client {client}"


def test_the_order_in_which_clients_first_appear_does_not_matter(begin, world):
    def first_updates(order):
        algorithm, ctx, progress = begin(**world)
        now = Ctx(ctx.task, ctx.protocol, ctx.seed, round=1)
        return {
            client: algorithm.update(
                on_wire(algorithm.download(progress.server, now.at(client))),
                progress.clients[client],
                ctx.task.train_data(client),
                now.at(client),
            )
            for client in order
        }

    forwards, backwards = first_updates(range(4)), first_updates(reversed(range(4)))

    for client in range(4):
        for one, other in zip(forwards[client], backwards[client], strict=True):
            assert same(one, other), f"client {client}"


def test_a_resumed_run_is_an_uninterrupted_one_bit_for_bit(run, short_job, world):
    job = short_job(**world, rounds=3, rule="best_all", tau=2)

    whole, states_of_whole = run(job)
    halved, states_of_halved = run(job, stops=(1, 2))

    assert halved.rewinds == [0, 1, 2]
    assert measured(halved) == measured(whole)
    assert states_of_halved.entries == states_of_whole.entries


# --- traffic ---


def test_counted_bytes_are_those_of_the_ledger(begin, train, witness, method, ledger):
    assert method in ledger, (
        f"The method {method!r} has no line in LEDGER of tests/contract/conftest.py. Add how many numbers a client "
        "gets and sends in a round, so that its traffic is held against the specification (section 1.4)."
    )
    algorithm, ctx, progress = begin()
    net, seen = ctx.task.net, witness(algorithm)
    body, head = (len(range(*part.indices(net.flat.numel()))) for part in (net.body, net.head))
    # dnn100 on digits: 64*100+100, 100*10+10
    assert (body, head) == (6_500, 1_010)
    line = ledger[method](body + head, body, head)

    traffic = train(algorithm, ctx, progress, 2)

    everyone = 4 if algorithm.polls() else 0
    expected = [
        (4 * line.down * (everyone or len(cohort.train)), 4 * (line.up * len(cohort.report) + line.poll * everyone))
        for cohort in seen.cohorts
    ]
    assert traffic == expected


# --- learning ---


def test_it_learns_with_its_default_settings(run, begin, method, margin, short_job):
    whole = {"rounds": 20, "eval_every": 20, "tau": 20, "f": 1.0}
    algorithm, ctx, progress = begin(**whole)

    recorder, _ = run(short_job(**whole))

    for final in recorder.evaluations(stage="final"):
        untrained = Standing(algorithm, progress.server, progress.clients, ctx).evaluate(final.view, final.predict)
        gain = final.metrics[None]["accuracy"] - untrained.metrics[None]["accuracy"]
        assert gain >= margin, f"{method}: {final.view}, {final.predict}"
    assert recorder.evaluations(stage="final")

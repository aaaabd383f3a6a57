"""Methods that train where all the data is: the cohort is one client, and nothing travels."""

import pytest
import torch

from fedbench.algorithm import Algorithm, Params
from fedbench.simulation import Surroundings, simulate, train_round


class Pooled(Algorithm):
    """Notes what it is given; its state counts the rounds."""

    title = "Pooled"
    pooled = True

    def __init__(self, params=None):
        super().__init__(params or Params())
        self.seen = []
        self.uploads = []

    def init_server(self, ctx):
        return {"w": torch.zeros(3)}

    def init_client(self, ctx):
        raise AssertionError("no client has a memory of its own")

    def select(self, server, polls, ctx):
        self.cohort = super().select(server, polls, ctx)
        return self.cohort

    def download(self, server, ctx):
        raise AssertionError("nothing is sent down")

    def update(self, down, memory, data, ctx):
        self.seen.append((ctx.round, ctx.client, data, memory))
        self.down = down
        return {"w": down["w"] + 1}, {"own": torch.ones(1)}

    def aggregate(self, server, uploads, ctx):
        self.uploads += (uploads := list(uploads))
        return uploads[0].message


@pytest.fixture
def pooled_round(make_ctx, begin_training):
    """One round of a pooled toy with four clients: the toy, the context, the cost and the state after it."""

    def train(cls=Pooled, **settings):
        ctx = make_ctx(clients=4, model="logreg", **settings)
        algorithm = cls()
        progress = begin_training(algorithm, ctx)
        return algorithm, ctx, train_round(algorithm, progress, ctx), progress

    return train


def data_of(*parts):
    return torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])


def test_it_gets_all_data_at_once(pooled_round):
    algorithm, ctx, traffic, _ = pooled_round()

    ((_, client, data, _),) = algorithm.seen
    x, y = data_of(*(ctx.task.train_data(client) for client in range(4)))
    assert client is None
    assert torch.equal(data.x, x)
    assert torch.equal(data.y, y)
    assert traffic.updates == 1


def test_it_gets_the_data_of_the_cohort_only(pooled_round):
    algorithm, ctx, _, _ = pooled_round(f=0.5)

    ((_, _, data, _),) = algorithm.seen
    assert len(algorithm.cohort.train) == 2
    assert torch.equal(data.x, data_of(*(ctx.task.train_data(client) for client in algorithm.cohort.train))[0])


def test_it_gets_no_data_of_newcomers(pooled_round):
    algorithm, ctx, _, _ = pooled_round(newcomers=2)

    ((_, _, data, _),) = algorithm.seen
    assert torch.equal(data.x, data_of(ctx.task.train_data(2), ctx.task.train_data(3))[0])


def test_its_cohorts_are_those_of_every_other_method(pooled_round, make_ctx):
    algorithm, ctx, _, _ = pooled_round(f=0.5, seed=5)

    assert algorithm.cohort == Algorithm(Params()).select({}, {}, ctx)


def test_its_upload_weighs_as_much_as_all_samples(pooled_round):
    algorithm, _, _, _ = pooled_round()

    # digits, small: 25 training samples each
    assert [upload.n for upload in algorithm.uploads] == [4 * 25]


def test_it_trains_the_servers_state_itself(pooled_round):
    algorithm, _, _, progress = pooled_round()

    assert torch.equal(algorithm.down["w"], torch.zeros(3))
    assert torch.equal(progress.server["w"], torch.ones(3))


def test_nothing_is_sent(pooled_round):
    _, _, traffic, _ = pooled_round()

    assert (traffic.bytes_down, traffic.bytes_up) == (0, 0)


def test_no_client_keeps_anything(pooled_round):
    algorithm, _, _, progress = pooled_round()

    ((_, _, _, memory),) = algorithm.seen
    assert memory == {}
    assert len(progress.clients) == 0


def test_its_upload_is_rounded_as_if_it_travelled(pooled_round):
    class Doubled(Pooled):
        def update(self, down, memory, data, ctx):
            return {"w": torch.zeros(3, dtype=torch.float64)}, {}

    algorithm, _, _, _ = pooled_round(Doubled)

    assert algorithm.uploads[0].message["w"].dtype == torch.float32


def test_it_trains_even_if_the_aggregation_does_not_ask(pooled_round):
    class Lazy(Pooled):
        def aggregate(self, server, uploads, ctx):
            return server

    algorithm, _, traffic, _ = pooled_round(Lazy)

    assert len(algorithm.seen) == traffic.updates == 1


# --- whole runs ---


@pytest.fixture
def run(make_job, add_method, recorder, tmp_path):
    def simulate_pooled(cls, **settings):
        made = []

        class Kept(cls):
            def __init__(self, params=None):
                super().__init__(params)
                made.append(self)

            def predict(self, model, x, ctx, mode):
                return torch.full((len(x), 10), 0.1)

            def init_client(self, ctx):
                return {}

        add_method("pooled", Kept)
        outcome = simulate(make_job("pooled", clients=4, model="logreg", **settings), recorder, Surroundings(tmp_path))
        return outcome, made[0], recorder

    return simulate_pooled


def test_a_run_updates_once_in_every_round_and_sends_nothing(run):
    outcome, algorithm, recorder = run(Pooled, rounds=3)

    assert outcome == "done"
    assert [(round_, client) for round_, client, *_ in algorithm.seen] == [(1, None), (2, None), (3, None)]
    assert recorder.traffic() == [(0, 0)] * 3
    assert [cost.count for record in recorder.kept.values() for cost in record.costs if cost.phase == "client"] == [
        1
    ] * 3


def test_a_run_scores_its_model_on_every_client(run):
    _, _, recorder = run(Pooled, rounds=1)

    (final,) = recorder.evaluations(stage="final", view="gm", predict="mean")
    assert set(final.metrics) == {None, 0, 1, 2, 3}


@pytest.mark.parametrize("hidden", [False, True], ids=["in the average", "thrown away"])
def test_a_pooled_run_can_diverge(run, hidden):
    class Diverging(Pooled):
        def update(self, down, memory, data, ctx):
            return {"w": torch.tensor([float("nan")])}, {}

        def aggregate(self, server, uploads, ctx):
            merged = super().aggregate(server, uploads, ctx)
            return server if hidden else merged

    outcome, _, recorder = run(Diverging, rounds=3)

    assert outcome == "diverged"
    assert recorder.last_round() == 1


def test_an_error_says_in_which_round_it_arose(run):
    class Broken(Pooled):
        def update(self, down, memory, data, ctx):
            raise RuntimeError("no")

    with pytest.raises(RuntimeError) as caught:
        run(Broken, rounds=1)

    assert "in update, round 1" in caught.value.__notes__

"""Jobs: validation with clear errors, and a key that names the content and nothing else."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedbench.algorithm import methods
from fedbench.errors import FedbenchError
from fedbench.job import JobSpec, Protocol, TaskSpec, build_job, canonical_json, known_settings
from fedbench.partition import get_partition

TASK_DEFAULTS = {
    "clients": 10,
    "partition": "labels",
    "model": "dnn100",
    "normalize": "half",
    "augment": "none",
    "newcomers": 0,
    "server_fraction": 0,
    "clean": None,
    "ood": None,
    "train_part": "all",
    "norm": "bn_nostats",
}
PROTOCOL_DEFAULTS = {
    "rounds": 100,
    "f": 1.0,
    "train_all": False,
    "local_unit": "epoch",
    "tau": 1,
    "batch_size": 50,
    "optimizer": "sgd",
    "lr": 0.01,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "lr_decay": 1.0,
    "optim_state": "reset",
    "weighting": "samples",
    "beta": 1.0,
    "eval_every": 10,
    "rule": "final",
    "headline": "accuracy",
    "adapt_epochs": [],
    "adapt_from": "final",
    "adapt_lr": None,
    "adapt_part": "all",
    "novel_rounds": 0,
    "mc_samples": 10,
    "mc_every": 0,
}
LABELS_DEFAULTS = {"size": "small", "labels_per_client": 5, "labels": "block", "stratified": True}
PFEDBAYES_DEFAULTS = {
    "zeta": 10.0,
    "kl_scale": "samples",
    "rho0": -2.5,
    "mu_std": 0.1,
    "rho_std": 0.0,
    "local_reparam": False,
    "noise_scale": 1.0,
    "personal_steps": 1,
    "samples": 1,
    "lr_global": None,
    "agg": "param",
    "bayes_norm": "point",
    "loss_scale": "mean",
}
# One value other than the default for every setting of a FedProx job but its method and data set.
OTHER_VALUES: dict[str, Any] = {
    "seed": 1,
    "clients": 4,
    "model": "logreg",
    "normalize": "none",
    "augment": "crop_flip",
    "newcomers": 0.2,
    "server_fraction": 0.1,
    "clean": "digits",
    "ood": "digits",
    "train_part": "body",
    "norm": "gn",
    "rounds": 20,
    "f": 0.5,
    "train_all": True,
    "local_unit": "batch",
    "tau": 5,
    "batch_size": 10,
    "optimizer": "adam",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.001,
    "lr_decay": 0.5,
    "optim_state": "persistent",
    "weighting": "uniform",
    "beta": 2.0,
    "eval_every": 5,
    "rule": "best_all",
    "headline": "macro",
    "adapt_epochs": [5],
    "adapt_from": "best",
    "adapt_lr": 0.001,
    "adapt_part": "head",
    "novel_rounds": 3,
    "mc_samples": 3,
    "mc_every": 4,
    "size": "large",
    "labels_per_client": 2,
    "labels": "shift",
    "stratified": False,
    "mu": 0.5,
}


def job(method: str = "fedavg", **settings: Any) -> JobSpec:
    return build_job({"method": method, "dataset": "digits", **settings})


def defaults_of(section: Any) -> dict[str, Any]:
    """As JSON would hold them: without tuples."""
    defaults = {name: field.default for name, field in section.model_fields.items() if not field.is_required()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of user plugins; what is loaded from it is forgotten afterwards."""
    package = importlib.import_module("fedbench.algorithms")
    path = list(package.__path__)
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.setenv("FEDBENCH_PLUGINS", str(folder))
    yield folder
    package.__path__[:] = path
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
            vars(package).pop(name.rpartition(".")[2], None)
    importlib.invalidate_caches()


# --- defaults are part of the key ---


@pytest.mark.parametrize(
    ("section", "pinned"),
    [
        (TaskSpec, TASK_DEFAULTS),
        (Protocol, PROTOCOL_DEFAULTS),
        (get_partition("labels").Params, LABELS_DEFAULTS),
    ],
    ids=["task", "protocol", "labels"],
)
def test_the_defaults_of_the_engine_are_the_pinned_ones(section: Any, pinned: dict[str, Any]) -> None:
    assert defaults_of(section) == pinned, (
        "A default changed. Keys hold only what differs from the defaults, so results stored under the old default "
        "would be taken for the new one: raise ENGINE_VERSION in fedbench/job.py, then change this snapshot."
    )


def test_a_job_with_nothing_but_method_and_dataset_has_all_defaults() -> None:
    assert job().settings == {
        "method": "fedavg",
        "seed": 0,
        "dataset": "digits",
        **TASK_DEFAULTS,
        **PROTOCOL_DEFAULTS,
        **LABELS_DEFAULTS,
    }


# --- errors name the key and the way out ---


@pytest.mark.parametrize(
    ("settings", "wrong", "proposed"),
    [
        ({"method": "fedavgg"}, "'fedavgg'", "fedavg"),
        ({"dataset": "digit"}, "'digit'", "digits"),
        ({"partition": "label"}, "'label'", "labels"),
        ({"model": "dnn10"}, "'dnn10'", "dnn100"),
        ({"batchsize": 20}, "'batchsize'", "batch_size"),
        ({"method": "fedprox", "muu": 1}, "'muu'", "mu"),
        ({"stratifed": True}, "'stratifed'", "stratified"),
    ],
    ids=["method", "dataset", "partition", "model", "protocol", "params", "partition_params"],
)
def test_an_unknown_name_is_refused_with_the_nearest_known_one(
    settings: dict[str, Any], wrong: str, proposed: str
) -> None:
    with pytest.raises(FedbenchError) as caught:
        build_job({"method": "fedavg", "dataset": "digits", **settings})

    assert wrong in caught.value.message
    assert caught.value.hint.startswith("Did you mean")
    assert proposed in caught.value.hint


def test_a_setting_of_another_method_is_unknown() -> None:
    with pytest.raises(FedbenchError, match="method fedavg has no setting 'mu'"):
        job("fedavg", mu=0.1)


@pytest.mark.parametrize("missing", ["method", "dataset"])
def test_a_job_without_method_or_dataset_says_which(missing: str) -> None:
    settings = {"method": "fedavg", "dataset": "digits"}
    del settings[missing]

    with pytest.raises(FedbenchError, match=f"the job has no {missing}"):
        build_job(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", "first"),
        ("seed", -1),
        ("clients", 0),
        ("clients", 2.5),
        ("rounds", "many"),
        ("rounds", None),
        ("rounds", [10, 20]),
        ("f", 0),
        ("f", 1.01),
        ("tau", 0),
        ("lr", "fast"),
        ("lr", 0),
        ("lr", float("inf")),
        ("lr", float("nan")),
        ("momentum", 1.0),
        ("optimizer", "sdg"),
        ("rule", "last"),
        ("train_all", "sometimes"),
        ("labels", "blocks"),
        ("labels_per_client", 0),
        ("mu", -1),
        ("mu", {"a": 1}),
    ],
)
def test_a_wrong_value_names_its_key_and_what_was_given(key: str, value: Any) -> None:
    with pytest.raises(FedbenchError, match=r"wrong setting for method fedprox") as caught:
        job("fedprox", **{key: value})

    assert f"\n{key}: " in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_size_that_the_data_set_does_not_have_is_refused_when_the_job_is_built() -> None:
    with pytest.raises(FedbenchError, match="digits has no size 'smal'") as caught:
        job(size="smal")

    assert caught.value.hint == "Did you mean small?"


def test_more_labels_than_classes_are_refused_when_the_job_is_built() -> None:
    with pytest.raises(FedbenchError, match="labels_per_client is 11"):
        job(labels_per_client=11)


def test_a_method_parameter_with_the_name_of_an_engine_setting_is_refused(plugins: Path) -> None:
    (plugins / "greedy.py").write_text(
        "from fedbench.algorithm import Algorithm, Params\n\n\n"
        "class GreedyParams(Params):\n    lr: float = 0.5\n\n\n"
        "class Greedy(Algorithm):\n    title = 'Greedy'\n    Params = GreedyParams\n"
    )

    with pytest.raises(FedbenchError) as caught:
        job("greedy")

    assert "GreedyParams" in caught.value.message
    assert "'lr'" in caught.value.message
    assert "Protocol" in caught.value.message
    assert "Rename" in caught.value.hint


@pytest.mark.parametrize("name", ["seed", "dataset", "size"])
def test_a_method_parameter_may_not_take_the_name_of_any_other_section(plugins: Path, name: str) -> None:
    (plugins / "greedy.py").write_text(
        "from fedbench.algorithm import Algorithm, Params\n\n\n"
        f"class GreedyParams(Params):\n    {name}: str = ''\n\n\n"
        "class Greedy(Algorithm):\n    title = 'Greedy'\n    Params = GreedyParams\n"
    )

    with pytest.raises(FedbenchError, match=f"has a setting '{name}'"):
        known_settings("greedy", "labels")


# --- frozen ---


@pytest.mark.parametrize("field", ["method", "seed", "task", "protocol", "params"])
def test_a_job_cannot_be_changed(field: str) -> None:
    made = job()

    with pytest.raises(ValidationError, match="frozen"):
        setattr(made, field, None)


def test_the_protocol_of_a_job_cannot_be_changed() -> None:
    made = job()

    with pytest.raises(ValidationError, match="frozen"):
        made.protocol.lr = 1.0  # type: ignore[misc]


# --- changed and settings ---


def test_nothing_is_changed_when_nothing_is_set() -> None:
    assert job().changed == {}


def test_changed_holds_exactly_what_differs_from_the_defaults() -> None:
    made = job("fedprox", lr=0.1, size="large", mu=0.5, rounds=100, clients=10, seed=3)

    # rounds and clients are the defaults; the seed has a place of its own in the key
    assert made.changed == {"lr": 0.1, "size": "large", "mu": 0.5}


def test_the_methods_own_protocol_defaults_are_not_changes() -> None:
    made = job("pfedbayes")

    assert made.changed == {}
    assert (made.protocol.optimizer, made.protocol.lr, made.protocol.batch_size) == ("adam", 0.001, 100)


def test_going_back_to_the_engines_default_is_a_change_for_a_method_with_its_own() -> None:
    made = job("pfedbayes", optimizer="sgd")

    assert made.changed == {"optimizer": "sgd"}


def test_settings_are_flat_and_complete() -> None:
    made = job("pfedbayes", lr=0.05, zeta=1, seed=2)

    assert made.settings == {
        "method": "pfedbayes",
        "seed": 2,
        "dataset": "digits",
        **TASK_DEFAULTS,
        **LABELS_DEFAULTS,
        **PROTOCOL_DEFAULTS,
        **PFEDBAYES_DEFAULTS,
        # the method's own defaults for the protocol
        "optimizer": "adam",
        "batch_size": 100,
        "optim_state": "persistent",
        "train_all": True,
        "weighting": "uniform",
        # what was set
        "lr": 0.05,
        "zeta": 1.0,
    }


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "pfedbayes"])
def test_known_settings_are_the_names_of_all_settings(method: str) -> None:
    assert known_settings(method, "labels") == set(job(method).settings)


def test_every_setting_has_another_value_in_the_tests_below() -> None:
    assert set(OTHER_VALUES) == set(job("fedprox").settings) - {"method", "dataset", "partition"}


# --- the key ---


def test_a_key_is_twenty_hexadecimal_digits() -> None:
    key = job().key

    assert len(key) == 20
    assert int(key, 16) >= 0


def test_a_key_does_not_change_from_release_to_release() -> None:
    # sha256 of {"changed":{"lr":0.1},"dataset":"digits","engine":1,"method":"fedavg","seed":3,"version":1},
    # first 20 digits, by the command `sha256sum`. Stored results are found by it.
    assert job("fedavg", lr=0.1, seed=3).key == "1086a083fbb1d054d5cb"


@given(st.randoms(use_true_random=False), st.sets(st.sampled_from(sorted(OTHER_VALUES))))
def test_a_key_does_not_depend_on_the_order_of_settings(shuffler: random.Random, names: set[str]) -> None:
    items = [("method", "fedprox"), ("dataset", "digits"), *((name, OTHER_VALUES[name]) for name in sorted(names))]
    shuffled = items.copy()
    shuffler.shuffle(shuffled)

    assert build_job(dict(shuffled)).key == build_job(dict(items)).key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"f": 1}, {"f": 1.0}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"rounds": 20}, {"rounds": 20.0}),
        ({"mu": 2}, {"mu": 2.0}),
        ({"lr": 0.001}, {"lr": "1e-3"}),
        ({"seed": 1}, {"seed": "1"}),
        ({"train_all": True}, {"train_all": "true"}),
    ],
)
def test_a_key_does_not_depend_on_how_a_value_is_written(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert job("fedprox", **one).key == job("fedprox", **other).key


def test_an_optional_number_is_the_same_as_integer_and_as_float() -> None:
    assert job("pfedbayes", lr_global=1).key == job("pfedbayes", lr_global=1.0).key


@pytest.mark.parametrize("method", ["local", "fedavg", "fedprox", "pfedbayes"])
def test_writing_a_default_does_not_change_the_key(method: str) -> None:
    plain = job(method)

    for name, value in plain.settings.items():
        assert build_job({"method": method, "dataset": "digits", name: value}).key == plain.key, name


@given(st.sets(st.sampled_from(sorted(OTHER_VALUES))))
def test_the_settings_of_a_job_build_the_same_job_again(names: set[str]) -> None:
    made = job("fedprox", **{name: OTHER_VALUES[name] for name in names})

    assert build_job(made.settings) == made


@pytest.mark.parametrize("name", sorted(OTHER_VALUES))
def test_every_setting_changes_the_key(name: str) -> None:
    assert job("fedprox", **{name: OTHER_VALUES[name]}).key != job("fedprox").key


def test_every_setting_changes_the_key_to_a_key_of_its_own() -> None:
    keys = {job("fedprox", **{name: value}).key for name, value in OTHER_VALUES.items()}

    assert len(keys) == len(OTHER_VALUES)


def test_the_method_and_the_data_set_change_the_key() -> None:
    keys = {
        job("fedavg").key,
        job("local").key,
        build_job({"method": "fedavg", "dataset": "mnist"}).key,
    }

    assert len(keys) == 3


def test_the_version_of_the_method_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = job("fedavg")
    monkeypatch.setattr(methods.get("fedavg"), "version", before.version + 1)

    assert job("fedavg").key != before.key


def test_the_version_of_one_method_leaves_the_keys_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = job("local").key
    monkeypatch.setattr(methods.get("fedavg"), "version", 99)

    assert job("local").key == before


def test_the_version_of_the_engine_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = job()
    before = made.key
    monkeypatch.setattr("fedbench.job.ENGINE_VERSION", 99)

    assert made.key != before


@pytest.mark.parametrize("method", ["fedavg", "pfedbayes"])
def test_a_job_survives_the_way_through_json(method: str) -> None:
    made = job(method, lr=0.3, size="large", seed=5)

    again = JobSpec.model_validate(json.loads(made.model_dump_json()))

    assert again == made
    assert again.key == made.key


def test_canonical_json_is_one_text_per_content() -> None:
    assert canonical_json({"b": 1, "a": [1.5, None, "ü"]}) == '{"a":[1.5,null,"\\u00fc"],"b":1}'


# --- for people ---


def test_a_label_names_method_data_set_size_and_seed() -> None:
    assert job("fedprox", size="medium", seed=2).label == "fedprox digits medium seed 2"

"""Grids: the order of the layers, what the command line changes, and a clear error for every mistake."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbench.algorithm import methods
from fedbench.errors import FedbenchError
from fedbench.grid import Changes, Grid, expand, grid_names, load_grid, parse_grid
from fedbench.job import JobSpec
from fedbench.paper import Override, Paper


def grid(**parts: Any) -> Grid:
    """A grid of one FedAvg job on the digits, but for what is given."""
    content = {"name": "g", "methods": ["fedavg"], "tasks": [{"dataset": "digits"}], **parts}
    return parse_grid(yaml.safe_dump(content, sort_keys=False), "g.yaml")


def jobs(changes: Changes | None = None, **parts: Any) -> list[JobSpec]:
    return expand(grid(**parts), changes)


def only_job(changes: Changes | None = None, **parts: Any) -> JobSpec:
    (job,) = jobs(changes, **parts)
    return job


def values(found: Iterable[JobSpec], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(job.settings[name] for name in names) for job in found]


def made_up_paper(
    common: dict[str, Any] | None = None,
    of_methods: dict[str, dict[str, Any]] | None = None,
    overrides: list[Override] | None = None,
) -> Paper:
    return Paper(
        name="made_up",
        title="Made up",
        set=common or {},
        methods=of_methods or {},
        overrides=overrides or [],
        method_names={},
        dataset_names={},
    )


# --- union, product, order ---


def test_tasks_are_a_union() -> None:
    found = jobs(tasks=[{"dataset": "digits"}, {"dataset": "mnist", "clients": 4}])

    assert values(found, "dataset", "clients") == [("digits", 10), ("mnist", 4)]


def test_axes_are_a_product() -> None:
    found = jobs(axes={"lr": [0.1, 0.2], "seed": [0, 1, 2]})

    assert values(found, "lr", "seed") == [(0.1, 0), (0.1, 1), (0.1, 2), (0.2, 0), (0.2, 1), (0.2, 2)]


def test_methods_tasks_and_axes_multiply() -> None:
    found = jobs(
        methods=["fedavg", "local", "fedprox"],
        tasks=[{"dataset": "digits"}, {"dataset": "mnist"}],
        axes={"seed": [0, 1], "tau": [1, 2]},
    )

    assert len({job.key for job in found}) == len(found) == 24  # 3 methods * 2 tasks * 2 seeds * 2 tau


def test_a_method_of_the_grid_may_carry_settings_in_either_form() -> None:
    found = jobs(methods=["fedprox[mu=0.5]", {"fedprox": {"mu": 0.25}}, {"fedprox": None}])

    assert values(found, "mu") == [(0.5,), (0.25,), (0.001,)]  # 0.001 is FedProx's own default


def test_the_same_job_written_twice_is_one_job() -> None:
    found = jobs(
        methods=["fedavg", "fedavg", {"fedavg": {"lr": 0.01}}],  # 0.01 is the default
        tasks=[{"dataset": "digits"}, {"dataset": "digits", "clients": 10}],  # so is 10
        axes={"seed": [3, 3]},
    )

    assert values(found, "method", "seed") == [("fedavg", 3)]


# --- the order of the layers ---

LAYERS = {
    "the method's defaults": 0.001,  # pFedBayes wants 0.001 of itself
    "the paper's common settings": 0.02,
    "the paper's settings for the method": 0.03,
    "the paper's overrides": 0.04,
    "the grid's set": 0.05,
    "the task": 0.06,
    "the point on the axes": 0.07,
    "the method's own settings in the grid": 0.08,
    "the grid's overrides": 0.09,
    "the command line": 0.1,
}


def lr_with(layers: Iterable[str]) -> float:
    """The learning rate of a pFedBayes job when exactly these layers set it."""
    given = {name: {"lr": LAYERS[name]} for name in layers}

    def layer(name: str) -> dict[str, Any]:
        return given.get(name, {})

    def override(name: str) -> list[Override]:
        return [Override(match={"method": "pfedbayes"}, set=layer(name))] if layer(name) else []

    paper = made_up_paper(
        layer("the paper's common settings"),
        {"pfedbayes": layer("the paper's settings for the method")},
        override("the paper's overrides"),
    )
    written = Grid(
        name="g",
        paper="made_up",
        methods=[{"pfedbayes": layer("the method's own settings in the grid")}],  # type: ignore[list-item]
        tasks=[{"dataset": "digits", **layer("the task")}],
        set=layer("the grid's set"),
        axes={key: [value] for key, value in layer("the point on the axes").items()},
        overrides=override("the grid's overrides"),
    )
    changes = Changes(set=[f"{key}={value}" for key, value in layer("the command line").items()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedbench.grid.load_paper", lambda name: paper)
        (job,) = expand(written, changes)
    return job.protocol.lr


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_reaches_the_job(layer: str) -> None:
    assert lr_with([layer]) == LAYERS[layer]


@pytest.mark.parametrize(
    ("lower", "upper"),
    list(zip(list(LAYERS)[:-1], list(LAYERS)[1:], strict=True)),
    ids=lambda name: name.replace(" ", "_"),
)
def test_the_upper_of_two_neighbouring_layers_wins(lower: str, upper: str) -> None:
    assert lr_with([lower, upper]) == LAYERS[upper]


@settings(deadline=None)
@given(st.sets(st.sampled_from(list(LAYERS)), min_size=1))
def test_the_uppermost_of_any_layers_wins(layers: set[str]) -> None:
    # the values grow from layer to layer
    assert lr_with(layers) == max(LAYERS[layer] for layer in layers)


def test_the_papers_settings_are_the_defaults_of_its_grids() -> None:
    job = only_job(paper="pfedbayes", tasks=[{"dataset": "mnist"}])

    assert (job.protocol.rounds, job.protocol.rule, job.protocol.weighting) == (800, "best_last100", "uniform")


def test_the_papers_settings_for_one_method_do_not_reach_another() -> None:
    found = jobs(paper="pfedbayes", methods=["fedavg", "pfedbayes"], tasks=[{"dataset": "mnist"}])

    assert values(found, "method", "batch_size") == [("fedavg", 20), ("pfedbayes", 100)]


def test_a_setting_of_one_method_given_to_all_is_dropped_for_the_others() -> None:
    found = jobs(methods=["fedavg", "fedprox"], set={"mu": 0.5})

    assert [job.params for job in found] == [{}, {"mu": 0.5}]


def test_a_foreign_axis_does_not_multiply_the_other_methods() -> None:
    found = jobs(methods=["fedavg", "fedprox"], axes={"mu": [0.1, 0.2]})

    assert [(job.method, job.params) for job in found] == [
        ("fedavg", {}),
        ("fedprox", {"mu": 0.1}),
        ("fedprox", {"mu": 0.2}),
    ]


# --- overrides and exclude ---


def test_an_override_concerns_the_jobs_that_match_a_value() -> None:
    found = jobs(methods=["fedavg", "local"], overrides=[{"match": {"method": "local"}, "set": {"lr": 0.5}}])

    assert values(found, "method", "lr") == [("fedavg", 0.01), ("local", 0.5)]


def test_an_override_concerns_the_jobs_that_match_one_of_a_list() -> None:
    found = jobs(
        methods=["fedavg", "local", "fedprox"],
        overrides=[{"match": {"method": ["local", "fedprox"]}, "set": {"lr": 0.5}}],
    )

    assert values(found, "method", "lr") == [("fedavg", 0.01), ("local", 0.5), ("fedprox", 0.5)]


def test_an_override_needs_all_its_keys_to_match() -> None:
    found = jobs(
        methods=["fedavg", "local"],
        axes={"seed": [0, 1]},
        overrides=[{"match": {"method": "local", "seed": 1}, "set": {"lr": 0.5}}],
    )

    assert values(found, "method", "seed", "lr") == [
        ("fedavg", 0, 0.01),
        ("fedavg", 1, 0.01),
        ("local", 0, 0.01),
        ("local", 1, 0.5),
    ]


def test_the_later_of_two_matching_overrides_wins() -> None:
    job = only_job(
        overrides=[
            {"match": {"method": "fedavg"}, "set": {"lr": 0.1, "tau": 2}},
            {"match": {"dataset": "digits"}, "set": {"lr": 0.2}},
        ]
    )

    assert (job.protocol.lr, job.protocol.tau) == (0.2, 2)


def test_an_override_can_match_what_the_command_line_sets() -> None:
    job = only_job(Changes(set=["tau=5"]), overrides=[{"match": {"tau": 5}, "set": {"lr": 0.5}}])

    assert job.protocol.lr == 0.5


def test_an_override_matches_the_value_that_the_job_has_in_the_end() -> None:
    job = only_job(
        paper="pfedbayes",  # its settings for pfedbayes say lr 0.001
        methods=["pfedbayes"],
        tasks=[{"dataset": "mnist"}],
        set={"lr": 0.05},
        overrides=[{"match": {"lr": 0.05}, "set": {"mu_std": 0.2}}],
    )

    assert job.params["mu_std"] == 0.2


def test_an_override_can_match_what_the_papers_overrides_set() -> None:
    job = only_job(
        paper="pfedbayes",  # its overrides give CIFAR-10 20 clients
        tasks=[{"dataset": "cifar10"}],
        overrides=[{"match": {"clients": 20}, "set": {"lr": 0.5}}],
    )

    assert job.protocol.lr == 0.5


def test_an_override_can_match_a_default() -> None:
    job = only_job(overrides=[{"match": {"model": "dnn100"}, "set": {"lr": 0.5}}])

    assert job.protocol.lr == 0.5


def test_a_pattern_in_scientific_notation_matches_the_number() -> None:
    found = jobs(axes={"lr": [0.001, 0.1]}, exclude=[{"lr": "1e-3"}])  # YAML gives "1e-3" for a bare 1e-3

    assert values(found, "lr") == [(0.1,)]


def test_excluded_points_are_left_out() -> None:
    found = jobs(methods=["fedavg", "local"], axes={"seed": [0, 1, 2]}, exclude=[{"method": "local", "seed": [1, 2]}])

    assert values(found, "method", "seed") == [("fedavg", 0), ("fedavg", 1), ("fedavg", 2), ("local", 0)]


def test_exclude_sees_what_an_override_sets() -> None:
    found = jobs(
        methods=["fedavg", "local"],
        overrides=[{"match": {"method": "local"}, "set": {"tau": 7}}],
        exclude=[{"tau": 7}],
    )

    assert values(found, "method") == [("fedavg",)]


def test_exclude_can_match_a_default() -> None:
    found = jobs(tasks=[{"dataset": "digits"}, {"dataset": "digits", "model": "logreg"}], exclude=[{"model": "dnn100"}])

    assert values(found, "model") == [("logreg",)]


# --- the command line ---


def test_a_set_value_collapses_the_axis_of_its_name() -> None:
    found = jobs(Changes(set=["seed=5"]), axes={"seed": [0, 1, 2], "tau": [1, 2]})

    assert values(found, "seed", "tau") == [(5, 1), (5, 2)]


def test_an_axis_of_the_command_line_replaces_the_grids() -> None:
    found = jobs(Changes(axes=["seed=7,8"]), axes={"seed": [0, 1, 2]})

    assert values(found, "seed") == [(7,), (8,)]


def test_an_axis_of_the_command_line_may_be_new() -> None:
    found = jobs(Changes(axes=["lr=1e-3, 0.1"]), axes={"seed": [0, 1]})

    assert values(found, "seed", "lr") == [(0, 0.001), (0, 0.1), (1, 0.001), (1, 0.1)]


def test_methods_of_the_command_line_replace_the_grids_with_their_parameters() -> None:
    found = jobs(Changes(methods="fedprox[mu=0.5,lr=0.1],local"), methods=["fedavg", "fedprox"])

    assert [(job.method, job.params.get("mu"), job.protocol.lr) for job in found] == [
        ("fedprox", 0.5, 0.1),
        ("local", None, 0.01),
    ]


def test_the_papers_settings_hold_for_a_method_of_the_command_line() -> None:
    job = only_job(Changes(methods="local"), paper="pfedbayes", tasks=[{"dataset": "mnist"}])

    assert job.params == {"budget": "full"}


def test_a_setting_of_a_method_that_the_command_line_left_out_is_no_typo() -> None:
    job = only_job(Changes(methods="fedavg"), methods=["fedavg", "fedprox"], set={"mu": 0.5})

    assert job.changed == {}


@pytest.mark.parametrize(
    "changes",
    [
        Changes(set=["rounds"]),
        Changes(set=["=3"]),
        Changes(set=["rounds=[1, 2]"]),
        Changes(axes=["seed"]),
        Changes(axes=["seed="]),
        Changes(axes=["=1"]),
        Changes(methods="fedprox[mu"),
        Changes(methods="fedprox[mu]"),
    ],
    ids=str,
)
def test_a_malformed_change_is_refused(changes: Changes) -> None:
    with pytest.raises(FedbenchError):
        jobs(changes, methods=["fedavg", "fedprox"])


def test_an_axis_of_the_command_line_without_values_is_named() -> None:
    with pytest.raises(FedbenchError, match="seed"):
        jobs(Changes(axes=["seed=,"]), axes={"seed": [0, 1]})


def test_methods_cannot_be_given_as_an_axis_and_then_ignored() -> None:
    with pytest.raises(FedbenchError, match="method"):
        jobs(axes={"method": ["local", "fedprox"]})


# --- shorthands ---


@pytest.mark.parametrize(("budget", "tau", "rounds"), [(320, 1, 320), (320, 10, 32), (10, 3, 3), (5, 8, 1)])
def test_an_epoch_budget_gives_the_rounds(budget: int, tau: int, rounds: int) -> None:
    # floor(320/1), floor(320/10), floor(10/3), and at least one round
    job = only_job(set={"epoch_budget": budget, "tau": tau})

    assert job.protocol.rounds == rounds


def test_an_epoch_budget_follows_tau_along_its_axis() -> None:
    found = jobs(set={"epoch_budget": 320}, axes={"tau": [1, 10]})

    assert values(found, "tau", "rounds") == [(1, 320), (10, 32)]


def test_explicit_rounds_win_over_an_epoch_budget() -> None:
    job = only_job(set={"epoch_budget": 320, "rounds": 7, "tau": 10})

    assert job.protocol.rounds == 7


def test_a_job_from_an_epoch_budget_is_the_job_with_those_rounds() -> None:
    assert only_job(set={"epoch_budget": 40, "tau": 2}).key == only_job(set={"rounds": 20, "tau": 2}).key


def test_an_epoch_budget_is_divided_by_the_methods_default_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods.get("fedavg"), "defaults", {"tau": 5})

    job = only_job(set={"epoch_budget": 100})

    assert (job.protocol.tau, job.protocol.rounds) == (5, 20)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"epoch_budget": "lots"}, "epoch_budget"),
        ({"epoch_budget": -5}, "epoch_budget"),
        ({"epoch_budget": 10, "tau": 0}, "tau"),
        ({"epoch_budget": 10, "tau": "x"}, "tau"),
    ],
    ids=str,
)
def test_a_wrong_epoch_budget_is_named(given: dict[str, Any], named: str) -> None:
    with pytest.raises(FedbenchError, match=named):
        jobs(set=given)


def test_a_partition_may_carry_its_settings_in_brackets() -> None:
    job = only_job(tasks=[{"dataset": "digits", "partition": "labels[size=large,labels_per_client=2]"}])

    assert job.task.partition == "labels"
    assert (job.partition_params["size"], job.partition_params["labels_per_client"]) == ("large", 2)


def test_a_partition_with_brackets_is_the_same_job_as_one_without() -> None:
    short = only_job(tasks=[{"dataset": "digits", "partition": "labels[size=large]"}])
    long = only_job(tasks=[{"dataset": "digits", "partition": "labels", "size": "large"}])

    assert short.key == long.key


def test_the_command_line_wins_over_the_brackets_of_a_partition() -> None:
    job = only_job(Changes(set=["size=large"]), tasks=[{"dataset": "digits", "partition": "labels[size=medium]"}])

    assert job.partition_params["size"] == "large"


def test_the_partition_may_be_an_axis() -> None:
    found = jobs(axes={"partition": ["labels", "labels[labels=shift]"]})

    assert values(found, "labels") == [("block",), ("shift",)]


def test_an_override_may_match_one_of_several_partitions() -> None:
    job = only_job(
        tasks=[{"dataset": "digits", "partition": "labels"}],
        overrides=[{"match": {"partition": ["labels"]}, "set": {"lr": 0.5}}],
    )

    assert job.protocol.lr == 0.5


# --- mistakes in the file ---


@pytest.mark.parametrize("text", ["name: [g", "a: b: c", "\tname: g", "name: 'g", "{", "- *nobody", "name: g\x00"])
def test_what_is_not_yaml_is_said_in_one_line(text: str) -> None:
    with pytest.raises(FedbenchError, match=r"^g\.yaml is not YAML: ") as caught:
        parse_grid(text, "g.yaml")

    assert "\n" not in str(caught.value)


def test_yaml_that_cannot_be_constructed_is_a_clear_error() -> None:
    with pytest.raises(FedbenchError, match=r"g\.yaml"):
        parse_grid("name: 2024-13-45\nmethods: [fedavg]\ntasks: [{dataset: digits}]\n", "g.yaml")


@pytest.mark.parametrize("text", ["", "just words", "- fedavg\n- fedprox", "42", "null"])
def test_what_is_not_a_mapping_is_not_a_grid(text: str) -> None:
    with pytest.raises(FedbenchError, match="must have name, methods and tasks"):
        parse_grid(text, "g.yaml")


def test_an_unknown_key_of_a_grid_gets_a_proposal() -> None:
    with pytest.raises(FedbenchError, match="unknown key 'method'") as caught:
        grid(method=["fedavg"])

    assert caught.value.hint == "Did you mean methods?"


@pytest.mark.parametrize("missing", ["name", "methods", "tasks"])
def test_a_missing_part_of_a_grid_is_named(missing: str) -> None:
    content = {"name": "g", "methods": ["fedavg"], "tasks": [{"dataset": "digits"}]}
    del content[missing]

    with pytest.raises(FedbenchError, match=rf"{missing}: Field required"):
        parse_grid(yaml.safe_dump(content), "g.yaml")


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"methods": []}, "methods"),
        ({"methods": None}, "methods"),
        ({"methods": "fedavg"}, "methods"),
        ({"methods": [3]}, "methods"),
        ({"methods": [{"fedavg": {}, "fedprox": {}}]}, "methods"),
        ({"methods": [{"fedprox": 0.1}]}, "methods"),
        ({"methods": ["fedprox[mu"]}, "fedprox"),
        ({"tasks": []}, "tasks"),
        ({"tasks": {"dataset": "digits"}}, "tasks"),
        ({"tasks": ["digits"]}, "tasks"),
        ({"axes": {"seed": []}}, "seed"),
        ({"axes": {"seed": 3}}, "seed"),
        ({"axes": ["seed"]}, "axes"),
        ({"set": ["rounds"]}, "set"),
        ({"overrides": [{"match": {}, "set": {"lr": 1}}]}, "match"),
        ({"overrides": [{"match": {"seed": 1}, "set": {}}]}, "set"),
        ({"overrides": [{"match": {"seed": 1}}]}, "set"),
        ({"overrides": [{"match": {"seed": 1}, "sets": {"lr": 1}}]}, "sets"),
        ({"exclude": [3]}, "exclude"),
    ],
    ids=str,
)
def test_a_part_of_the_wrong_form_is_named(parts: dict[str, Any], named: str) -> None:
    with pytest.raises(FedbenchError, match=named) as caught:
        grid(**parts)

    assert str(caught.value).startswith("g.yaml")


@pytest.mark.parametrize("several", [[0, 1], {"a": 1}], ids=str)
def test_several_values_in_a_task_are_sent_to_the_axes(several: Any) -> None:
    with pytest.raises(FedbenchError, match=r"seed has several values; put them under `axes"):
        grid(tasks=[{"dataset": "digits", "seed": several}])


def test_several_values_in_set_are_refused_by_their_key() -> None:
    with pytest.raises(FedbenchError, match="seed"):
        jobs(set={"seed": [0, 1]})


@pytest.mark.parametrize(
    ("place", "parts", "changes"),
    [
        ("set", {"set": {"batchsize": 20}}, None),
        ("tasks", {"tasks": [{"dataset": "digits", "batchsize": 20}]}, None),
        ("axes", {"axes": {"batchsize": [20]}}, None),
        ("overrides", {"overrides": [{"match": {"batchsize": 20}, "set": {"lr": 1}}]}, None),
        ("overrides", {"overrides": [{"match": {"seed": 0}, "set": {"batchsize": 20}}]}, None),
        ("exclude", {"exclude": [{"batchsize": 20}]}, None),
        ("--set", {}, Changes(set=["batchsize=20"])),
        ("axes", {}, Changes(axes=["batchsize=20,30"])),
        ("fedavg", {"methods": [{"fedavg": {"batchsize": 20}}]}, None),
        ("fedavg", {}, Changes(methods="fedavg[batchsize=20]")),
    ],
    ids=["set", "tasks", "axes", "match", "override set", "exclude", "--set", "--axis", "methods", "--methods"],
)
def test_a_typo_is_found_in_every_layer(place: str, parts: dict[str, Any], changes: Changes | None) -> None:
    with pytest.raises(FedbenchError) as caught:
        jobs(changes, **parts)

    assert place in caught.value.message
    assert "'batchsize'" in caught.value.message
    assert "Did you mean batch_size" in caught.value.hint


def test_a_typo_in_the_brackets_of_a_partition_is_found() -> None:
    with pytest.raises(FedbenchError, match="sizee"):
        jobs(tasks=[{"dataset": "digits", "partition": "labels[sizee=large]"}])


def test_a_setting_that_no_method_of_the_grid_has_is_a_typo() -> None:
    with pytest.raises(FedbenchError, match="unknown setting 'mu'"):
        jobs(methods=["fedavg", "local"], set={"mu": 0.5})


def test_a_setting_of_another_method_given_to_a_method_itself_is_refused() -> None:
    with pytest.raises(FedbenchError, match="method fedavg has no setting 'mu'"):
        jobs(methods=[{"fedavg": {"mu": 0.5}}, "fedprox"])


@pytest.mark.parametrize(
    ("parts", "proposed"),
    [
        ({"methods": ["fedavgg"]}, "fedavg"),
        ({"tasks": [{"dataset": "digit"}]}, "digits"),
        ({"tasks": [{"dataset": "digits", "partition": "label"}]}, "labels"),
        ({"tasks": [{"dataset": "digits", "model": "dnn10"}]}, "dnn100"),
        ({"paper": "pfedbayse"}, "pfedbayes"),
    ],
    ids=["method", "dataset", "partition", "model", "paper"],
)
def test_an_unknown_name_in_a_grid_gets_a_proposal(parts: dict[str, Any], proposed: str) -> None:
    with pytest.raises(FedbenchError) as caught:
        jobs(**parts)

    assert caught.value.hint.startswith("Did you mean")
    assert proposed in caught.value.hint


def test_a_grid_of_which_everything_is_excluded_has_no_jobs() -> None:
    with pytest.raises(FedbenchError, match="grid g has no jobs: everything is excluded"):
        jobs(axes={"seed": [0, 1]}, exclude=[{"seed": [0, 1]}])


# --- finding the file ---


def test_a_grid_is_read_from_a_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nmethods: [fedavg]\ntasks: [{dataset: digits}]\n")

    assert load_grid(str(path)).name == "mine"


@pytest.mark.parametrize("where", ["quickstart", "quickstart.yaml"])
def test_a_shipped_grid_is_found_by_name(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert load_grid(where).name == "quickstart"


def test_a_file_is_preferred_to_the_shipped_grid_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "quickstart.yaml").write_text("name: mine\nmethods: [fedavg]\ntasks: [{dataset: digits}]\n")
    monkeypatch.chdir(tmp_path)

    assert load_grid("quickstart.yaml").name == "mine"


def test_a_path_that_is_not_there_does_not_fall_back_to_a_shipped_grid(tmp_path: Path) -> None:
    with pytest.raises(FedbenchError, match="no grid file"):
        load_grid(str(tmp_path / "quickstart.yaml"))


def test_an_unknown_grid_name_gets_a_proposal() -> None:
    with pytest.raises(FedbenchError, match="'quikstart'") as caught:
        load_grid("quikstart")

    assert caught.value.hint == "Did you mean quickstart?"


def test_a_folder_is_not_a_grid(tmp_path: Path) -> None:
    with pytest.raises(FedbenchError, match="no grid file"):
        load_grid(str(tmp_path))


def test_a_file_that_is_not_text_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "g.yaml"
    path.write_bytes(b"name: \xff\xfe\n")

    with pytest.raises(FedbenchError, match=r"g\.yaml cannot be read"):
        load_grid(str(path))


def test_a_file_without_permission_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "g.yaml"
    path.write_text("name: g\n")

    def refuse(self: Path, **options: Any) -> str:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", refuse)

    with pytest.raises(FedbenchError, match=r"g\.yaml cannot be read: .*Permission denied"):
        load_grid(str(path))


# --- the grids that ship ---


@pytest.mark.parametrize("name", grid_names())
def test_every_shipped_grid_expands_and_has_the_name_of_its_file(name: str) -> None:
    written = load_grid(name)

    assert written.name == name
    assert len(expand(written)) > 0


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("quickstart", 12),  # 4 methods * 3 seeds
        ("cifar_small", 9),  # 3 methods * 1 size * 3 seeds
        ("pfedbayes_mnist", 63),  # 7 methods * 3 sizes * 3 seeds
        ("pfedbayes_fmnist", 63),
        ("pfedbayes_cifar10", 63),
    ],
)
def test_a_shipped_grid_has_as_many_jobs_as_its_factors_say(name: str, count: int) -> None:
    assert len(expand(load_grid(name))) == count


def test_cifar_small_is_the_papers_cifar_protocol() -> None:
    found = expand(load_grid("cifar_small"))

    assert {(j.task.clients, j.protocol.f, j.task.model, j.protocol.rounds) for j in found} == {(20, 0.5, "vgg_s", 800)}


# --- order does not matter ---

SHUFFLED_GRID: dict[str, Any] = {
    "name": "g",
    "paper": "pfedbayes",
    "methods": ["fedavg", {"fedprox": {"mu": 0.5, "lr": 0.1}}, "pfedbayes[zeta=1,rho0=-3]"],
    "tasks": [{"dataset": "digits", "clients": 4}, {"dataset": "cifar10", "labels": "shift"}],
    "set": {"rounds": 20, "eval_every": 5},
    "axes": {"size": ["small", "large"], "seed": [0, 1], "mu": [0.1, 0.2]},
    "overrides": [
        {"match": {"method": "fedavg", "seed": 1}, "set": {"lr": 0.2, "tau": 3}},
        {"match": {"size": ["large", "medium"]}, "set": {"lr": 0.3}},
    ],
    "exclude": [{"method": "fedprox", "size": "large"}, {"dataset": "cifar10", "seed": 1}],
}


def shuffled(value: Any, shuffler: random.Random, place: str = "") -> Any:
    """The same content in another order; only the order of overrides means something, and stays."""
    if isinstance(value, dict):
        items = [(key, shuffled(inner, shuffler, key)) for key, inner in value.items()]
        shuffler.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        items = [shuffled(inner, shuffler) for inner in value]
        if place != "overrides":
            shuffler.shuffle(items)
        return items
    return value


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_a_grid_does_not_change_its_jobs(shuffler: random.Random) -> None:
    other = shuffled(SHUFFLED_GRID, shuffler)

    assert {job.key for job in jobs(**other)} == {job.key for job in jobs(**SHUFFLED_GRID)}


def test_the_upper_layer_decides_between_rounds_and_an_epoch_budget():
    grid = parse_grid("{name: g, paper: pfedbayes, methods: [fedavg], tasks: [{dataset: digits}]}", "g")

    # the paper says rounds: 800; the command line's budget of 60 epochs with tau 20 gives 60 // 20 = 3
    (job,) = expand(grid, Changes(set=["epoch_budget=60"]))

    assert job.protocol.rounds == 3


def test_a_setting_given_by_both_set_and_axis_is_refused():
    grid = parse_grid("{name: g, methods: [fedavg], tasks: [{dataset: digits}]}", "g")

    with pytest.raises(FedbenchError, match="both name seed"):
        expand(grid, Changes(set=["seed=0"], axes=["seed=1,2"]))

"""The parameters of all partitions: named after their class, explained, and nobody else's."""

from __future__ import annotations

import pytest

from fedbench.algorithm import methods
from fedbench.job import Frozen, Protocol, TaskSpec, known_settings
from fedbench.partition import get_partition, partition_names

NAMES = partition_names()


def test_files_that_partitions_share_are_no_partitions():
    assert set(NAMES) == {
        *("labels", "shards", "classes", "dirichlet", "clusters"),
        *("class_ratio", "label_window", "corruption", "natural"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_closed_and_named_after_their_partition(name):
    partition = get_partition(name)

    assert issubclass(partition.Params, Frozen)
    assert partition.Params.__name__ == f"{partition.__name__}Params"
    assert partition.__name__.lower() == name.replace("_", "")


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_default_and_an_explanation(name):
    for field in get_partition(name).Params.model_fields.values():
        assert not field.is_required()
        assert field.description


@pytest.mark.parametrize("name", NAMES)
def test_no_parameter_is_a_setting_of_task_or_protocol(name):
    own = set(get_partition(name).Params.model_fields)

    assert not own & {*TaskSpec.model_fields, *Protocol.model_fields, "method", "seed"}


@pytest.mark.parametrize("name", NAMES)
def test_every_method_can_be_combined_with_every_partition(name):
    for method in methods.names():
        assert set(get_partition(name).Params.model_fields) <= known_settings(method, name)

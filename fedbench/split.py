"""A data set cut into clients: who has which samples, by name and settings. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedbench.dataset import Arrays, Dataset, data_root, find_dataset, load_arrays
from fedbench.errors import FedbenchError, did_you_mean, explain
from fedbench.job import JobSpec
from fedbench.partition import Partition, Split, get_partition
from fedbench.rng import numpy_rng


def cut(job: JobSpec, root: Path | None = None) -> tuple[type[Dataset], Arrays, Split]:
    """The job's data set, its content, and who has what of it. Raises FedbenchError when that cannot be."""
    partition = make_partition(job.task.partition, job.partition_params)
    return cut_with(partition, job.task.dataset, job.task.clients, job.seed, root)


def cut_with(
    partition: Partition, name: str, clients: int, seed: int, root: Path | None = None
) -> tuple[type[Dataset], Arrays, Split]:
    """The same for a data set and a partition without a job around them."""
    dataset = find_dataset(name)
    partition.check(dataset)
    arrays = partition.prepare(load_arrays(dataset, root or data_root()), dataset)
    return dataset, arrays, partition.split(arrays, dataset, clients, numpy_rng(seed, "partition"))


def make_partition(name: str, settings: Mapping[str, Any]) -> Partition:
    """The partition of that name with these settings; raises FedbenchError that names a wrong one."""
    partition = get_partition(name)
    known = partition.Params.model_fields
    for key in settings:
        if key not in known:
            raise FedbenchError(f"the partition {name} has no setting {key!r}.", did_you_mean(key, known))
    try:
        return partition(partition.Params.model_validate(settings))
    except ValidationError as error:
        raise FedbenchError(f"wrong setting for the partition {name}:\n{explain(error)}") from None

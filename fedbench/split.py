"""A data set cut into clients: who has which samples, by name and settings. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from fedbench.dataset import Arrays, Dataset, data_root, find_dataset, load_arrays
from fedbench.errors import FedbenchError, did_you_mean, explain
from fedbench.job import JobSpec
from fedbench.partition import Partition, Split, get_partition
from fedbench.rng import numpy_rng


def cut(job: JobSpec, root: Path | None = None) -> tuple[type[Dataset], Arrays, Split]:
    """The job's data set, its content, and who has what of it. Raises FedbenchError when that cannot be."""
    partition = make_partition(job.task.partition, job.partition_params)
    dataset, arrays, split = cut_with(partition, job.task.dataset, job.task.clients, job.seed, root)
    return dataset, arrays, hold_back(split, job.task.server_fraction, numpy_rng(job.seed, "server_data"))


def hold_back(split: Split, fraction: float, rng: np.random.Generator) -> Split:
    """The same split, but for a part of every client's training samples that goes to the server (rounded down)."""
    if not fraction:
        return split
    taken = [np.sort(rng.choice(own, int(fraction * len(own) + 1e-9), replace=False)) for own in split.train]
    train = [np.setdiff1d(own, gone, assume_unique=True) for own, gone in zip(split.train, taken, strict=True)]
    return replace(split, train=train, server=np.concatenate(taken))


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

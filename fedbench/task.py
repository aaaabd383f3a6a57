"""A data set cut into clients, with a model: what the loop and the methods see of a task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedbench.dataset import Arrays, Dataset, data_root, datasets, load_arrays
from fedbench.errors import FedbenchError, did_you_mean
from fedbench.job import JobSpec, canonical_json
from fedbench.models import build_model
from fedbench.models.network import Network
from fedbench.partition import Indices, Split, get_partition
from fedbench.rng import numpy_rng, torch_rng

# Pixel scaling by name: mean and standard deviation on the [0, 1] scale, per channel or common to all.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((0.0,), (1.0,)),
    "half": ((0.5,), (0.5,)),
    "mnist": ((0.1307,), (0.3081,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}


class Images:
    """Pixels as bytes on the device, normalised batch by batch."""

    def __init__(self, x: Tensor, full_scale: int, normalize: str) -> None:
        if normalize not in NORMALISATIONS:
            raise FedbenchError(f"unknown normalisation {normalize!r}.", did_you_mean(normalize, NORMALISATIONS))
        mean, std = (torch.tensor(v, device=x.device).view(1, -1, 1, 1) for v in NORMALISATIONS[normalize])
        if mean.shape[1] not in (1, x.shape[1]):
            raise FedbenchError(f"normalisation {normalize!r} is for {mean.shape[1]} channels, not {x.shape[1]}.")
        self._x = x
        self._factor = 1 / (full_scale * std)
        self._offset = -mean / std

    def __getitem__(self, index: Tensor) -> Tensor:
        """The images at these positions, as float32."""
        return self._x.index_select(0, index).float().mul_(self._factor).add_(self._offset)


class ClientData:
    """One client's samples, by position in the task's tensors."""

    def __init__(self, images: Images, labels: Tensor, index: Tensor) -> None:
        self._images = images
        self._labels = labels
        self._index = index

    @property
    def n(self) -> int:
        return self._index.numel()

    @property
    def x(self) -> Tensor:
        return self._images[self._index]

    @property
    def y(self) -> Tensor:
        return self._labels[self._index]

    def batches(
        self, size: int, rng: torch.Generator, *, steps: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled mini-batches, the last of a pass possibly short: `epochs` passes, or `steps` batches in all."""
        per_pass = -(-self.n // size)
        if (steps is None) == (epochs is None):
            raise ValueError("give steps or epochs")
        left = per_pass * epochs if epochs is not None else (steps or 0)
        while left > 0:
            order = self._index[torch.randperm(self.n, generator=rng, device=rng.device)]
            for batch in order.split(size)[:left]:
                yield self._images[batch], self._labels[batch]
            left -= per_pass

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in fixed order, for evaluation."""
        for index in self._index.split(size):
            yield self._images[index], self._labels[index]


def cut(job: JobSpec, root: Path | None = None) -> tuple[type[Dataset], Arrays, Split]:
    """The job's data set, its content, and who has what of it. Raises FedbenchError when that cannot be."""
    dataset = datasets.get(job.task.dataset)
    partition_class = get_partition(job.task.partition)
    partition = partition_class(partition_class.Params.model_validate(job.partition_params))
    arrays = partition.prepare(load_arrays(dataset, root or data_root()), dataset)
    return dataset, arrays, partition.split(arrays, dataset, job.task.clients, numpy_rng(job.seed, "partition"))


def check_tasks(jobs: Iterable[JobSpec], root: Path) -> None:
    """Try every data set, partition and model of these jobs once, so that a mistake shows before anything runs."""
    seen = set()
    for job in jobs:
        if (content := canonical_json([job.task.model_dump(), job.partition_params, job.seed])) not in seen:
            seen.add(content)
            dataset, arrays, _ = cut(job, root)
            build_model(job.task.model, dataset.shape, dataset.classes)
            Images(torch.from_numpy(arrays.x[:1]), dataset.full_scale, job.task.normalize)


class Task:
    """The data of all clients and the one network of this process."""

    def __init__(self, job: JobSpec, *, device: torch.device, root: Path | None = None) -> None:
        spec = job.task
        dataset, arrays, self.split = cut(job, root)
        self.device = device
        self.clients = spec.clients
        self.classes = dataset.classes
        self._images = Images(torch.from_numpy(arrays.x).to(device), dataset.full_scale, spec.normalize)
        self._labels = torch.from_numpy(arrays.y).to(device)
        module = build_model(spec.model, dataset.shape, dataset.classes)
        assert isinstance(module, nn.Sequential)
        self.net = Network(module, device, trained=spec.train_part)
        # Drawn on the CPU, so that every device starts from the same network.
        self.net.initialise(torch_rng(job.seed, "init", 0, None, torch.device("cpu")))
        self.initial = self.net.vector.clone()
        """The common initial value of the trained parameters."""
        self.sizes = tuple(len(part) for part in self.split.train)

    def train_data(self, client: int) -> ClientData:
        return self._data([self.split.train[client]])

    def test_data(self, *clients: int) -> ClientData:
        """The test samples of these clients, one client after the other."""
        return self._data([self.split.test[client] for client in clients])

    def test_sizes(self, clients: tuple[int, ...]) -> list[int]:
        return [len(self.split.test[client]) for client in clients]

    def _data(self, parts: list[Indices]) -> ClientData:
        index = torch.from_numpy(np.concatenate(parts)).to(self.device)
        return ClientData(self._images, self._labels, index)

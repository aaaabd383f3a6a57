"""A data set cut into clients, with a model: what the loop and the methods see of a task."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedbench.dataset import Arrays, Dataset, data_root, find_dataset, load_arrays
from fedbench.errors import FedbenchError
from fedbench.images import ClientData, Images
from fedbench.job import JobSpec, TaskSpec
from fedbench.models import build_model
from fedbench.models.network import Network
from fedbench.partition import Indices
from fedbench.rng import numpy_rng, torch_rng
from fedbench.split import cut

__all__ = ["ClientData", "Task"]


class Task:
    """The data of all clients and the one network of this process."""

    def __init__(self, job: JobSpec, *, device: torch.device, root: Path | None = None) -> None:
        spec = job.task
        dataset, arrays, self.split = cut(job, root)
        self.device = device
        self.classes = self.split.classes or dataset.classes
        self.clients = len(self.split.train)
        """All clients, newcomers among them."""
        self.newcomers = self.split.newcomers or _newcomers(spec, self.clients, numpy_rng(job.seed, "newcomers"))
        """Clients that never train: they meet the trained model afterwards."""
        self.members = tuple(sorted({*range(self.clients)} - {*self.newcomers}))
        """Clients that train, and are scored while they do."""
        self.sizes = tuple(len(part) for part in self.split.train)
        """Number of training samples of every client."""
        self._spec, self._root, self._seed, self._shape = spec, root, job.seed, dataset.shape
        self._images, self._labels = self._on_device(dataset, arrays, spec.augment)
        self.net = self._network(self.classes, spec.train_part, regression=dataset.target_scale is not None)
        # Drawn on the CPU, so that every device starts from the same network.
        self.net.initialise(torch_rng(job.seed, "init", 0, None, torch.device("cpu")))
        self.initial = self.net.vector.detach().clone()
        """The common initial value of the trained parameters."""
        self._companions: dict[int, tuple[Network, torch.Tensor]] = {}

    def another_start(self, generator: torch.Generator) -> torch.Tensor:
        """Initial values of the trained parameters as another draw would have them; the network is left alone."""
        net = self._network(self.classes, self._spec.train_part)
        net.initialise(generator)
        return net.vector.detach().clone()

    def companion(self, outputs: int) -> tuple[Network, torch.Tensor]:
        """A second network of the same architecture with so many outputs, made once, and its initial vector.

        Its body is trained and its head stays as it was drawn; a network without a body is trained as a whole.
        """
        if outputs not in self._companions:
            net = self._network(outputs, "all" if self.net.body.stop == 0 else "body")
            net.initialise(torch_rng(self._seed, "init_companion", 0, None, torch.device("cpu")))
            self._companions[outputs] = net, net.vector.detach().clone()
        return self._companions[outputs]

    def _network(self, outputs: int, trained: str, *, regression: bool = False) -> Network:
        spec = self._spec
        module = build_model(spec.model, self._shape, outputs, spec.norm)
        return Network(module, self.device, trained=trained, regression=regression)

    @property
    def has_ood(self) -> bool:
        return self._spec.ood is not None

    def train_data(self, *clients: int) -> ClientData:
        """The training samples of these clients, one client after the other."""
        return self._data([self.split.train[client] for client in clients])

    def test_data(self, *clients: int) -> ClientData:
        """The test samples of these clients, one client after the other."""
        return self._data([self.split.test[client] for client in clients])

    def test_sizes(self, clients: tuple[int, ...]) -> list[int]:
        return [len(self.split.test[client]) for client in clients]

    def server_data(self) -> ClientData | None:
        """What the server itself holds, with -1 for labels: nobody may see them. None if that is nothing."""
        if not len(self.split.server):
            return None
        index = torch.from_numpy(self.split.server).to(self.device)
        return ClientData(self._images, torch.full_like(self._labels, -1), index)

    def clean_data(self) -> ClientData | None:
        """The training part of the data set that the task names as clean; nobody trains on it."""
        if self._spec.clean is None:
            return None
        images, labels, n_train = self._extra(self._spec.clean)
        return ClientData(images, labels, torch.arange(n_train, device=self.device))

    def ood_data(self, client: int) -> ClientData | None:
        """The foreign test images whose label number is one of the client's own labels."""
        if self._ood is None:
            return None
        images, labels, n_train = self._ood
        own = torch.from_numpy(np.unique(self._labels[torch.from_numpy(self.split.train[client])].cpu())).to(
            self.device
        )
        # a data set without an official test part is foreign as a whole
        test = torch.arange(n_train % len(labels), len(labels), device=self.device)
        return ClientData(images, labels, test[torch.isin(labels[test], own)])

    @cached_property
    def _ood(self) -> tuple[Images, torch.Tensor, int] | None:
        return None if self._spec.ood is None else self._extra(self._spec.ood)

    def _extra(self, name: str) -> tuple[Images, torch.Tensor, int]:
        dataset = find_dataset(name)
        arrays = load_arrays(dataset, self._root or data_root())
        return (*self._on_device(dataset, arrays, "none"), arrays.n_train)

    def _on_device(self, dataset: type[Dataset], arrays: Arrays, augment: str) -> tuple[Images, torch.Tensor]:
        x, y = torch.from_numpy(arrays.x).to(self.device), torch.from_numpy(arrays.y).to(self.device)
        if dataset.target_scale is not None:
            y = (y.double() / dataset.target_scale).float()
        return Images(x, dataset.full_scale, self._spec.normalize, augment), y

    def _data(self, parts: list[Indices]) -> ClientData:
        index = torch.from_numpy(np.concatenate(parts)).to(self.device)
        return ClientData(self._images, self._labels, index)


def _newcomers(spec: TaskSpec, clients: int, rng: np.random.Generator) -> tuple[int, ...]:
    """A random fraction of the clients, or the first so many."""
    wanted = spec.newcomers
    count = round(wanted * clients) if wanted < 1 else int(wanted)
    if count >= clients:
        raise FedbenchError(f"newcomers: {wanted:g} leaves none of {clients} clients to train.")
    drawn = rng.choice(clients, count, replace=False) if wanted < 1 else range(count)
    return tuple(sorted(int(client) for client in drawn))

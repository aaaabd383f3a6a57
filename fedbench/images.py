"""Images in memory as bytes, normalised (and in training augmented) batch by batch on the device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedbench.errors import FedbenchError, did_you_mean

# Pixel scaling by name: mean and standard deviation on the [0, 1] scale, per channel or common to all.
NORMALISATIONS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((0.0,), (1.0,)),
    "half": ((0.5,), (0.5,)),
    "mnist": ((0.1307,), (0.3081,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "cifar100": ((0.507, 0.487, 0.441), (0.267, 0.256, 0.276)),
}
PADDING = 4
"""Black pixels on each side before a random crop."""


class Images:
    """All images of a task."""

    def __init__(self, x: Tensor, full_scale: float, normalize: str, augment: str = "none") -> None:
        if normalize not in NORMALISATIONS:
            raise FedbenchError(f"unknown normalisation {normalize!r}.", did_you_mean(normalize, NORMALISATIONS))
        mean, std = (torch.tensor(v, device=x.device).view(1, -1, 1, 1) for v in NORMALISATIONS[normalize])
        if mean.shape[1] not in (1, x.shape[1]):
            raise FedbenchError(f"normalisation {normalize!r} is for {mean.shape[1]} channels, not {x.shape[1]}.")
        self._x = x
        self._factor = 1 / (full_scale * std)
        self._offset = -mean / std
        self.augments = augment == "crop_flip"

    def __getitem__(self, index: Tensor) -> Tensor:
        """The images at these positions, as float32."""
        return self._normalised(self._x.index_select(0, index))

    def augmented(self, index: Tensor, rng: torch.Generator) -> Tensor:
        """The same, each cropped at random from a black frame of 4 pixels, and mirrored with probability 1/2."""
        x = self._x.index_select(0, index)
        n, _, height, width = x.shape
        framed = pad(x, (PADDING,) * 4)
        top, left = (torch.randint(0, 2 * PADDING + 1, (2, n, 1), generator=rng, device=rng.device)).unbind()
        rows = top + torch.arange(height, device=x.device)
        columns = left + torch.arange(width, device=x.device)
        mirrored = torch.rand(n, 1, generator=rng, device=rng.device) < 0.5
        columns = torch.where(mirrored, columns.flip(-1), columns)
        cropped = framed[torch.arange(n, device=x.device)[:, None, None], :, rows[:, :, None], columns[:, None, :]]
        return self._normalised(cropped.permute(0, 3, 1, 2))

    def _normalised(self, x: Tensor) -> Tensor:
        return x.to(torch.float32, copy=True).mul_(self._factor).add_(self._offset)


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

    def numbered(self) -> ClientData:
        """The same samples with their numbers, 0 to n-1, as labels: for what a method knows of every single sample."""
        numbers = torch.zeros_like(self._labels, dtype=torch.long)
        numbers[self._index] = torch.arange(self.n, device=numbers.device)
        return ClientData(self._images, numbers, self._index)

    def batches(
        self, size: int, rng: torch.Generator, *, steps: int | None = None, epochs: int | None = None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled training batches, the last of a pass possibly short: `epochs` passes, or `steps` batches in all."""
        per_pass = -(-self.n // size)
        if (steps is None) == (epochs is None):
            raise ValueError("give steps or epochs")
        left = per_pass * epochs if epochs is not None else (steps or 0)
        if self.n == 0:
            return
        while left > 0:
            order = self._index[torch.randperm(self.n, generator=rng, device=rng.device)]
            for batch in order.split(size)[:left]:
                x = self._images.augmented(batch, rng) if self._images.augments else self._images[batch]
                yield x, self._labels[batch]
            left -= per_pass

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """All samples in fixed order, for evaluation."""
        for index in self._index.split(size):
            yield self._images[index], self._labels[index]

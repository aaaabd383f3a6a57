"""A module whose parameters and gradients are views of two flat buffers.

Methods work on one vector, the forward pass stays the plain module's. Convolution weights lie channels-last in the
buffer, which is 1.8 times faster on CPU. The head (last child) comes last, so that body and head are slices. Running
statistics of batch norms lie in the buffer beside their layer's parameters, so that servers average them like weights.
"""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from fedbench.models.dropout import Dropout

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)
_NORMS = (*_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm)


class Network:
    """One per process; `load` puts a client's or the server's vector into it."""

    def __init__(
        self, module: nn.Sequential, device: torch.device, *, trained: str = "all", regression: bool = False
    ) -> None:
        self.module = module.to(device)
        self.regression = regression
        """Whether the one output is a number to predict, and not the logits of classes."""
        layers = list(module.modules())
        contents = [(layer, value) for layer in layers for value in _values(layer)]
        size = sum(value.numel() for _, value in contents)
        d_head = sum(p.numel() for p in module[-1].parameters())
        self.flat = torch.zeros(size, device=device)
        self._flat_grad = torch.zeros(size, device=device)
        offset = 0
        linear_starts: list[int] = []
        for layer, value in contents:
            if isinstance(layer, nn.Linear) and value is layer.weight:
                linear_starts.append(offset)
            value.data = _view(self.flat, offset, value)
            if isinstance(value, nn.Parameter):
                value.grad = _view(self._flat_grad, offset, value)
            offset += value.numel()
        self.body = slice(0, size - d_head)
        self.head = slice(size - d_head, size)
        self.linear_starts = tuple(linear_starts)
        """Where the linear layers begin in the buffer, from input to output; the last of them is the head."""
        self._frozen_head = self.flat[self.head].clone()
        self.whole = _parameter(self.flat, self._flat_grad)
        """All of the network, with its gradient; what personalisation trains where the head was frozen."""
        part = self.body if trained == "body" else slice(0, size)
        self.vector = _parameter(self.flat[part], self._flat_grad[part])
        """What methods see as *the* parameters."""
        self.norm_mask = torch.cat([_filled(value, isinstance(layer, _NORMS)) for layer, value in contents])[part]
        """True at the affine parameters and the running statistics of normalisation layers."""
        self.not_norm = (~self.norm_mask).float() if bool(self.norm_mask.any()) else None
        """1 at all other coordinates, 0 at these; None where the network has no normalisation."""
        self.n_parameters = self.d - sum(s.numel() for layer in layers for s in _statistics(layer))
        """Length of the trained vector without running statistics."""
        self.uses_batch_statistics = any(isinstance(m, _BATCH_NORMS) and not m.track_running_stats for m in layers)
        """Whether a prediction depends on the other images of its batch."""
        self._with_modes = [m for m in layers if isinstance(m, Dropout) or _statistics(m)]
        self._channels_last = any(isinstance(m, nn.Conv2d) for m in layers)

    @property
    def d(self) -> int:
        """Length of the trained vector."""
        return self.vector.numel()

    @property
    def keeps_statistics(self) -> bool:
        """Whether the vector holds running statistics, which training moves without a gradient."""
        return self.n_parameters < self.d

    @property
    def tensors(self) -> tuple[slice, ...]:
        """Where the single weights, biases and other values of the layers lie in the trained vector."""
        ends = list(accumulate(value.numel() for layer in self.module.modules() for value in _values(layer)))
        return tuple(slice(begin, end) for begin, end in pairwise([0, *ends]) if end <= self.d)

    @cached_property
    def input_columns(self) -> Tensor:
        """For every trained coordinate the number of its weight column, from 1 on; 0 outside of weight matrices.

        A column is what one input of a layer is multiplied by; of a convolution, what one input channel is.
        """
        columns = torch.zeros_like(self.flat, dtype=torch.int64)
        seen = 0
        for layer in self.module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                own = _column_numbers(layer).to(columns.device)
                _view(columns, int(layer.weight.storage_offset()), layer.weight).copy_(own + seen)
                seen += int(own.max())
        return columns[: self.d]

    @property
    def grad(self) -> Tensor:
        """Gradient of the trained vector after `backward`, 0 at running statistics; a view that methods may add to."""
        grad = self.vector.grad
        assert grad is not None
        return grad

    def parameter(self, part: slice) -> nn.Parameter:
        """A part of the trained vector with its gradient: an optimiser on it leaves all the rest where it is."""
        return _parameter(self.vector[part], self.grad[part])

    def part_of_whole(self, part: slice) -> nn.Parameter:
        """The same for a part of the whole network, also of a frozen head."""
        return _parameter(self.flat[part], self._flat_grad[part])

    def trains(self, value: Tensor) -> bool:
        """Whether a layer's weight or bias is part of the trained vector."""
        return int(value.storage_offset()) < self.d

    def values_of(self, vector: Tensor, value: Tensor) -> Tensor:
        """What a vector like the trained one holds in the place of a layer's weight or bias; a view."""
        return _view(vector, int(value.storage_offset()), value)

    def load(self, vector: Tensor) -> None:
        """Copy a trained vector into the network, with the frozen head beside it, or a vector of the whole network."""
        if vector.numel() == self.flat.numel():
            self.flat.copy_(vector)
        else:
            self.vector.copy_(vector.view_as(self.vector))  # refuses another length, where copy_ would repeat one value
            self.flat[self.head] = self._frozen_head  # a whole network may have been here before

    def extended(self, vector: Tensor) -> Tensor:
        """The vector of the whole network: a trained vector and the frozen head, if there is one."""
        if vector.numel() == self.flat.numel():
            return vector
        return torch.cat([vector, self._frozen_head])

    def zero_grad(self) -> None:
        self._flat_grad.zero_()

    def use_generator(self, generator: torch.Generator) -> None:
        """Draw the dropout masks of the next training passes from this generator."""
        for layer in self._with_modes:
            if isinstance(layer, Dropout):
                layer.generator = generator

    def logits(self, x: Tensor, training: bool = False) -> Tensor:
        """Outputs for these images; in training with dropout, and with running statistics moved towards the batch's."""
        return self._pass(self.module, x, training)

    def features(self, x: Tensor, training: bool = False) -> Tensor:
        """What the body makes of these images: all that comes before the head."""
        return self._pass(self.module[:-1], x, training)

    def loss(self, x: Tensor, y: Tensor, training: bool = True) -> Tensor:
        """Of a batch: the mean cross-entropy; in regression half the mean squared error."""
        out = self.logits(x, training)
        return mse_loss(out.squeeze(-1), y) / 2 if self.regression else cross_entropy(out, y)

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities; in regression the predicted numbers."""
        out = self.logits(x)
        return out.squeeze(-1) if self.regression else out.softmax(-1)

    def _pass(self, layers: nn.Module, x: Tensor, training: bool) -> Tensor:
        for layer in self._with_modes:
            layer.training = training
        if self._channels_last:
            x = x.contiguous(memory_format=torch.channels_last)
        out: Tensor = layers(x)
        return out

    def initialise(self, generator: torch.Generator) -> None:
        """PyTorch's default initialisation, drawn from the given generator: U(-1/sqrt(fan_in), 1/sqrt(fan_in)).

        Norms start as the identity; what belongs to no layer, a log precision, starts at 0. This fixes the frozen head.
        """
        self.flat.zero_()
        for layer in self.module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                bound = layer.weight[0].numel() ** -0.5
                for p in (layer.weight, layer.bias):
                    if p is not None:
                        drawn = torch.empty(p.shape).uniform_(-bound, bound, generator=generator)
                        p.data.copy_(drawn)
            elif isinstance(layer, _NORMS):
                layer.weight.data.fill_(1.0)
                for variance in _statistics(layer)[1:]:
                    variance.fill_(1.0)
        self._frozen_head.copy_(self.flat[self.head])


def _values(layer: nn.Module) -> list[Tensor]:
    """What a layer itself has in the flat buffer."""
    return [*layer.parameters(recurse=False), *_statistics(layer)]


def _statistics(layer: nn.Module) -> list[Tensor]:
    """Running mean and variance of a batch norm that keeps them."""
    if not isinstance(layer, _BATCH_NORMS) or layer.running_mean is None or layer.running_var is None:
        return []
    return [layer.running_mean, layer.running_var]


def _column_numbers(layer: nn.Linear | nn.Conv2d) -> Tensor:
    """The number of the input that a weight belongs to, from 1 on, in a shape that expands to the weight's."""
    into = layer.weight.shape[1]
    numbers = torch.arange(1, into + 1).view(1, into, *[1] * (layer.weight.dim() - 2))
    if isinstance(layer, nn.Linear) or layer.groups == 1:
        return numbers
    group = torch.arange(layer.out_channels) // (layer.out_channels // layer.groups)  # which inputs an output sees
    return numbers + into * group.view(-1, 1, 1, 1)


def _parameter(value: Tensor, grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(value, requires_grad=False)
    parameter.grad = grad
    return parameter


def _filled(like: Tensor, value: bool) -> Tensor:
    return torch.full((like.numel(),), value, device=like.device)


def _view(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    part = flat[offset : offset + like.numel()]
    if like.dim() == 4:  # stored as out, height, width, in: channels-last when seen as out, in, height, width
        out, into, height, width = like.shape
        return part.view(out, height, width, into).permute(0, 3, 1, 2)
    return part.view(like.shape)

"""The loss of one batch under Gaussian weights, with the noise drawn in the weights or in the layers' outputs.

For theta ~ N(mu, s^2) a layer's output x theta is N(x mu, x^2 s^2): drawn there, every sample of a batch has noise of
its own. The expected gradient is the same, its variance is lower (local reparameterisation). A convolution uses its
weights at many places: each place's output has the right distribution, but their noise is drawn apart, as is usual.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from fedbench.models.network import Network
from fedbench.training import gradient

SMALLEST_VARIANCE = 1e-20
"""Added below the square root of an output's variance: the slope of the root has no value at 0."""


@dataclass(frozen=True)
class BatchLoss:
    """factor * (mean loss of a batch) as a function of the trained vector."""

    net: Network
    x: Tensor
    y: Tensor
    factor: float = 1.0

    def grad(self, theta: Tensor) -> Tensor:
        """The gradient at theta; a view, valid until the next call."""
        return gradient(self.net, self.x, self.y, self.factor, theta)

    def outputs_grad(self, mu: Tensor, spread: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The gradients over mu and spread for theta ~ N(mu, spread^2), drawn in the outputs of the layers.

        Linear layers and convolutions have noise; what else the network has is at its mean.
        """
        variance = spread.square().requires_grad_()
        with _noisy_outputs(self.net, variance, generator):
            over_mu = self.grad(mu)
        assert variance.grad is not None
        return over_mu, variance.grad.mul_(spread).mul_(2 * self.factor)


@contextmanager
def _noisy_outputs(net: Network, variance: Tensor, generator: torch.Generator) -> Iterator[None]:
    """Within it, every layer whose weights have a variance adds noise to its outputs."""

    def add_noise(layer: nn.Linear | nn.Conv2d, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        noise = torch.randn(out.shape, generator=generator, device=generator.device)
        return out + (_output_variance(net, layer, inputs[0], variance) + SMALLEST_VARIANCE).sqrt() * noise

    noisy = [layer for layer in net.module.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    hooks: list[Any] = [layer.register_forward_hook(add_noise) for layer in noisy if net.trains(layer.weight)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _output_variance(net: Network, layer: nn.Linear | nn.Conv2d, x: Tensor, variance: Tensor) -> Tensor:
    """x^2 times the variances of the layer's weights, plus those of its biases."""
    weight = net.values_of(variance, layer.weight)
    bias = None if layer.bias is None else net.values_of(variance, layer.bias)
    if isinstance(layer, nn.Linear):
        return linear(x.square(), weight, bias)
    return conv2d(x.square(), weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups)

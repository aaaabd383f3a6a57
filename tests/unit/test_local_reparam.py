"""Noise in layers' outputs: its moments are those of noise in the weights, and its gradients are autograd's."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fedbench.local_reparam import BatchLoss
from fedbench.models.network import Network

CPU = torch.device("cpu")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def network(*layers, trained="all"):
    net = Network(nn.Sequential(*layers), CPU, trained=trained)
    net.initialise(generator(7))
    return net


@pytest.fixture
def linear():
    """Two inputs, two outputs, no bias: the vector is the weights of output 0, then those of output 1."""
    return network(nn.Linear(2, 2, bias=False))


@pytest.fixture
def outputs(monkeypatch):
    """Collects what networks put out."""
    seen, logits = [], Network.logits

    def watched(self, *args, **kwargs):
        out = logits(self, *args, **kwargs)
        seen.append(out.detach())
        return out

    monkeypatch.setattr(Network, "logits", watched)
    return seen


def test_an_output_has_the_mean_and_the_variance_of_its_weights(linear, outputs):
    x = torch.tensor([[1.0, 2.0]]).repeat(40_000, 1)
    mu, spread = torch.tensor([1.0, -1.0, 0.5, 0.0]), torch.tensor([0.1, 0.2, 0.0, 0.3])

    BatchLoss(linear, x, torch.zeros(len(x), dtype=torch.int64)).outputs_grad(mu, spread, generator())

    # means 1 - 2 and 0.5; variances 1 * 0.01 + 4 * 0.04 = 0.17 and 4 * 0.09 = 0.36; every image has its own draw
    assert outputs[0].mean(0).tolist() == pytest.approx([-1.0, 0.5], abs=0.01)
    assert outputs[0].var(0).tolist() == pytest.approx([0.17, 0.36], rel=0.03)


def test_the_gradients_are_autograds_on_the_same_noise(linear):
    x, y = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.0]]), torch.tensor([0, 1, 1])
    mu, spread = torch.tensor([1.0, -1.0, 0.5, 0.0]), torch.tensor([0.1, 0.2, 0.05, 0.3])
    noise = torch.randn(3, 2, generator=generator(3))
    wanted_mu, wanted_spread = mu.clone().requires_grad_(), spread.clone().requires_grad_()
    out = x @ wanted_mu.view(2, 2).T + (x**2 @ wanted_spread.view(2, 2).T.square()).sqrt() * noise
    (5 * cross_entropy(out, y)).backward()

    over_mu, over_spread = BatchLoss(linear, x, y, factor=5).outputs_grad(mu, spread, generator(3))

    assert torch.allclose(over_mu, wanted_mu.grad, atol=1e-6)
    assert torch.allclose(over_spread, wanted_spread.grad, atol=1e-6)


def test_the_expected_gradient_is_that_of_noise_in_the_weights():
    """Averaged over 4,000 draws; a single gradient varies by about 0.2, so that means are known to 0.004."""
    net = network(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    x, y = torch.randn(6, 4, generator=generator(1)), torch.tensor([0, 1, 2, 0, 1, 2])
    mu, loss, draws = net.vector.detach().clone(), BatchLoss(net, x, y), generator(2)
    spread = torch.full_like(mu, 0.3)
    in_weights, in_outputs = torch.zeros(2, mu.numel()), torch.zeros(2, mu.numel())
    for _ in range(4000):
        noise = torch.randn(mu.shape, generator=draws)
        grad = loss.grad(mu + spread * noise)
        in_weights += torch.stack([grad, grad * noise]) / 4000
        in_outputs += torch.stack(loss.outputs_grad(mu, spread, draws)) / 4000

    assert in_weights.abs().max().item() > 0.08
    assert torch.allclose(in_outputs, in_weights, atol=0.015)


@pytest.mark.parametrize("settings", [{"padding": 1, "stride": 2}, {"groups": 2}, {"bias": False, "dilation": 2}])
def test_outputs_of_convolutions_vary_as_their_weights_make_them(outputs, settings):
    net = network(nn.Conv2d(2, 4, 2, **settings), nn.Flatten())
    x, draws = torch.randn(1, 2, 3, 3, generator=generator(1)), generator(2)
    mu = net.vector.detach().clone()
    spread = torch.linspace(0.1, 0.5, mu.numel())
    drawn = []
    for _ in range(4000):
        net.load(mu + spread * torch.randn(mu.shape, generator=draws))
        drawn.append(net.logits(x).detach())
    outputs.clear()

    BatchLoss(net, x.expand(4000, -1, -1, -1), torch.zeros(4000, dtype=torch.int64)).outputs_grad(mu, spread, draws)

    # a variance from 4,000 draws is known to 2.2 %
    assert torch.allclose(outputs[0].var(0), torch.cat(drawn).var(0), rtol=0.12)
    assert torch.allclose(outputs[0].mean(0), torch.cat(drawn).mean(0), atol=0.1)


def test_its_gradient_varies_less_than_that_of_noise_in_the_weights():
    net = network(nn.Linear(20, 3))
    x, y = torch.randn(50, 20, generator=generator(1)), torch.randint(3, (50,), generator=generator(2))
    mu, draws = net.vector.detach().clone(), generator(3)
    spread, loss = torch.full_like(mu, 0.3), BatchLoss(net, x, y)

    weights = torch.stack([loss.grad(mu + spread * torch.randn(mu.shape, generator=draws)).clone() for _ in range(200)])
    outputs = torch.stack([loss.outputs_grad(mu, spread, draws)[0].clone() for _ in range(200)])

    assert outputs.var(0).sum().item() < 0.5 * weights.var(0).sum().item()


def test_a_frozen_head_has_no_noise(outputs):
    net = network(nn.Linear(2, 2), nn.Linear(2, 2), trained="body")
    mu, x = net.vector.detach().clone(), torch.ones(2, 2)

    BatchLoss(net, x, torch.tensor([0, 1])).outputs_grad(mu, torch.zeros_like(mu), generator())

    net.load(mu)
    assert torch.allclose(outputs[0], net.logits(x).detach(), atol=1e-6)


def test_the_network_is_plain_again_afterwards(linear):
    x, y, mu = torch.ones(2, 2), torch.tensor([0, 1]), linear.vector.detach().clone()
    before = linear.logits(x).detach()

    with pytest.raises(ValueError, match="batch_size"):  # labels that do not fit the images
        BatchLoss(linear, x, y[:1].repeat(7)).outputs_grad(mu, torch.ones_like(mu), generator())

    linear.load(mu)
    assert torch.equal(linear.logits(x).detach(), before)

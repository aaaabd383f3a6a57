"""A task small enough to follow by hand, and one round of a method on it."""

import sys

import pytest
import torch

from fedbench import training
from fedbench.algorithm import Ctx, methods
from fedbench.simulation import train_round


@pytest.fixture
def tiny(add_dataset):
    """Settings of two clients with two training images of two pixels each, for a logistic regression.

    Client 0 has (1, 0) of class 0 and (0, 2) of class 1; client 1 has (2, 0) of class 0 and (0, 1) of class 1.
    A vector holds the weights of class 0, those of class 1, and the two biases.
    """
    of_class_0 = [(1, 0), (9, 0), (2, 0), (9, 0)]  # training and test image of client 0, then of client 1
    of_class_1 = [(0, 2), (0, 9), (0, 1), (0, 9)]
    pixels = torch.tensor([of_class_0, of_class_1]).view(8, 1, 1, 2)
    add_dataset("tiny", pixels, [0] * 4 + [1] * 4, per_class=(1, 1), full_scale=1)
    return {"dataset": "tiny", "normalize": "none", "model": "logreg", "labels_per_client": 2, "batch_size": 2}


@pytest.fixture
def run_rounds(begin_training):
    """Train some rounds from a server state (by default the method's own); the progress after them."""

    def run(algorithm, ctx, rounds=1, server=None):
        progress = begin_training(algorithm, ctx, server)
        for number in range(1, rounds + 1):
            train_round(algorithm, progress, Ctx(ctx.task, ctx.protocol, ctx.seed, number))
        return progress

    return run


@pytest.fixture
def quadratic(monkeypatch):
    """Puts f(w) = (a/2) ||w - c||^2 in place of the cross-entropy; returns the points where gradients are taken."""

    def install(a, c):
        visited = []

        def backward(net, x, y):
            visited.append(net.vector.detach().clone())
            net.grad.copy_(a * (net.vector - c))

        plugins = [sys.modules[methods.get(name).__module__] for name in methods.names()]
        for module in (training, *plugins):
            if hasattr(module, "backward"):  # a method may have imported it by name
                monkeypatch.setattr(module, "backward", backward)
        return visited

    return install


@pytest.fixture
def two_layers(tiny, make_ctx):
    """A context on the tiny task with 100 hidden units in two halves; all weights of the first layer start at u.

    The first half votes for class 0 (weights +1 and -1), the second half for class 1: together the logits are 0, and
    both classes have probability 1/2. A unit says u times the sum of the pixels. A vector holds 100 pairs of weights
    and 100 biases (the body, 300 numbers), 100 weights of class 0, 100 of class 1 and two biases (the head, 202).
    """

    def make(method, u=1.0, **settings):
        ctx = make_ctx(method, **{**tiny, "model": "dnn100", "lr": 0.1, **settings})
        votes = torch.ones(100)
        votes[50:] = -1.0
        ctx.task.initial = torch.cat([torch.full((200,), u), torch.zeros(100), votes, -votes, torch.zeros(2)])
        return ctx

    return make

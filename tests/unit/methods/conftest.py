"""A task small enough to follow by hand, and one round of a method on it."""

import pytest
import torch

from fedbench.algorithm import Ctx
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

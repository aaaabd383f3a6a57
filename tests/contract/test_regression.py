"""What a method must do that says it fits regression: on round quadratics, whose global mean is the origin."""

import pytest
import torch

from fedbench.algorithm import fits_regression, methods
from fedbench.errors import FedbenchError
from fedbench.evaluation import Standing

ROUND = {"dataset": "quadratics[condition=1]", "f": 1.0, "local_unit": "epoch", "tau": 5, "lr": 0.1, "rounds": 40}


def test_it_fits_numbers_or_is_refused(method, regression, short_job, begin, train):
    settings = {**regression, **ROUND}
    if not fits_regression(methods.get(method)):
        with pytest.raises(FedbenchError, match=f"method {method} needs classes"):
            short_job(**settings)
        return
    algorithm, ctx, progress = begin(**settings)

    train(algorithm, ctx, progress, 40)

    standing = Standing(algorithm, progress.server, progress.clients, ctx)
    common, personal = (standing.evaluate(view, "mean") for view in ("gm", "pm"))
    assert common or personal
    if common:  # the optima are 0.28 away; nothing but weight samples pulls a common model away from the middle
        assert common.metrics[None]["rmse"] < 0.03
    if personal:  # a client's own model is on the way from the middle to its optimum, be it by one step of rate 0.1
        model, data = standing.model_of("pm")(0), ctx.task.train_data(0)
        with torch.no_grad():
            errors = algorithm.predict(model, data.x, ctx.at(0), "mean") - data.y
        assert errors.square().mean() < 0.85 * data.y.square().mean()

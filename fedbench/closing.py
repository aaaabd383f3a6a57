"""What is scored when training is over: best and final state, other data, adaptation, newcomers."""

from __future__ import annotations

from dataclasses import replace

from fedbench.algorithm import State
from fedbench.evaluation import VIEWS, Standing
from fedbench.records import Evaluation, Stage, View
from fedbench.wire import on_wire


def closing(best: dict[View, Standing], final: Standing) -> list[Evaluation]:
    """Every view's best and final state, client by client, by mean and by MC prediction; also on other data."""
    found: list[Evaluation | None] = []
    for view in VIEWS:
        moments: list[tuple[Stage, Standing]] = [("best", best[view]), ("final", final)] if view in best else []
        for stage, standing in moments:
            for mode in standing.modes:
                found.append(standing.evaluate(view, mode, stage=stage, per_client=True))
                if view == "gm":
                    found.append(standing.evaluate_clean(mode, stage))
                found.append(standing.evaluate_ood(view, mode, stage))
    return [evaluation for evaluation in found if evaluation is not None]


def adapted(best: dict[View, Standing], final: Standing) -> list[Evaluation]:
    """Personal models after some epochs on the client's own data: a rung per entry of `adapt_epochs`.

    Of the newcomers, if there are any (FedABML's ladder), else of all clients (FedHB's personalisation, +FT).
    """
    protocol, task = final.ctx.protocol, final.ctx.task
    standing = best.get("gm", best.get("pm", final)) if protocol.adapt_from == "best" else final
    clients = task.newcomers or task.members
    found = [
        standing.evaluate(
            "pm",
            mode,
            stage="adapt",
            step=epochs,
            clients=clients,
            model_of=standing.model_of("pm", epochs),
            per_client=True,
        )
        for epochs in protocol.adapt_epochs
        for mode in standing.modes
    ]
    return [evaluation for evaluation in found if evaluation is not None]


def novel(final: Standing) -> list[Evaluation]:
    """Newcomers who receive what the method shares, keep it fixed, and train the rest by the method's own update."""
    ctx, algorithm, server = final.ctx, final.algorithm, final.server
    memories: dict[int, State] = {client: final.memories[client] for client in ctx.task.newcomers}
    found: list[Evaluation | None] = []
    for step in range(1, ctx.protocol.novel_rounds + 1):
        now = replace(ctx, round=ctx.rounds + step, novel=True)
        models: dict[int, State | None] = {}
        for client in memories:
            here, data = now.at(client), ctx.task.train_data(client)
            ctx.task.net.use_generator(here.rng("dropout"))
            _, memories[client] = algorithm.update(
                on_wire(algorithm.download(server, here)), memories[client], data, here
            )
            models[client] = algorithm.personal_model(server, memories[client], data, here, None)
        found.append(final.evaluate("pm", "mean", stage="novel", step=step, clients=tuple(models), model_of=models.get))
    return [evaluation for evaluation in found if evaluation is not None]

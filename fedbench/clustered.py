"""The base of methods with several server models, of which every client has one.

It stands before a method that has a single model: in `class IFCA(ChosenByClients, FedAvg)` the hooks of FedAvg see a
server with one model, that of the client's cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedbench.algorithm import Algorithm, Ctx, Message, State, Upload
from fedbench.job import Frozen
from fedbench.task import ClientData


class Clustered(Algorithm):
    """The server's tensors named in `rows` have a row for every cluster's model. GM is the model of the client's own.

    What is scored has `in_cluster`: 1 at the number of the client's cluster, 0 elsewhere. `describe` reads it, so that
    every evaluation records who belongs where; the mean over the clients is a cluster's share of them.
    """

    rows: ClassVar[tuple[str, ...]] = ("w",)

    def __init__(self, params: Frozen) -> None:
        super().__init__(params)
        self._shown: tuple[State, dict[int, State]] = {}, {}

    def cluster_of(self, server: State, data: ClientData, ctx: Ctx) -> int:
        """The number of the client's cluster."""
        raise NotImplementedError

    def cluster_trained(self, server: State, upload: Upload) -> int:
        """The number of the cluster whose model an upload is."""
        raise NotImplementedError

    def n_models(self, server: State) -> int:
        """How many models there are to belong to."""
        return len(server[self.rows[0]])

    def model(self, server: State, cluster: int) -> State:
        """A cluster's model, as the state of a server that has no other."""
        return {key: server[key][cluster] for key in self.rows}

    def marked(self, model: State, cluster: int, server: State) -> State:
        """A client's model together with where the client belongs."""
        device = model[self.rows[0]].device
        return {**model, "in_cluster": (torch.arange(self.n_models(server), device=device) == cluster).int()}

    def aggregate(self, server: State, uploads: Iterable[Upload], ctx: Ctx) -> State:
        """Cluster by cluster; the model of one that nobody trained stays as it is."""
        members: dict[int, list[Upload]] = {}
        for upload in uploads:
            members.setdefault(self.cluster_trained(server, upload), []).append(upload)
        return self.merged(server, members, ctx)

    def merged(self, server: State, members: Mapping[int, Sequence[Upload]], ctx: Ctx) -> State:
        """The server with the models of some clusters aggregated, each from the uploads of its members."""
        stacked = {key: server[key].clone() for key in self.rows}
        for cluster, uploads in members.items():
            models = [replace(u, message={key: u.message[key] for key in self.rows}) for u in uploads]
            for key, value in super().aggregate(self.model(server, cluster), models, ctx).items():
                stacked[key][cluster] = value
        return {**server, **stacked}

    def global_model(self, server: State, memory: State, data: ClientData, ctx: Ctx) -> State | None:
        """The model of the client's cluster; the same object for all its members."""
        if self._shown[0] is not server:
            self._shown = server, {}
        cluster = self.cluster_of(server, data, ctx)
        return self._shown[1].setdefault(cluster, self.marked(self.model(server, cluster), cluster, server))

    def personal_model(
        self, server: State, memory: State, data: ClientData, ctx: Ctx, epochs: int | None
    ) -> State | None:
        """The model of the client's cluster, adapted as the method adapts a server's; nothing without adaptation."""
        if epochs is None:
            return None
        cluster = self.cluster_of(server, data, ctx)
        model = super().personal_model(self.model(server, cluster), memory, data, ctx, epochs)
        return None if model is None else self.marked(model, cluster, server)

    def describe(self, model: State, ctx: Ctx) -> dict[str, float]:
        """`in_cluster_k`: whether the client belongs to cluster k; on average, the share of clients that do."""
        return {f"in_cluster_{k}": float(belongs) for k, belongs in enumerate(model["in_cluster"].tolist())}


class ChosenByClients(Clustered):
    """Every client gets all models, takes the one with the smallest loss on its training data, and says which."""

    def cluster_of(self, server: State, data: ClientData, ctx: Ctx) -> int:
        """The cluster with the smallest loss; the first of equal ones."""
        if self.n_models(server) == 1:
            return 0
        return int(self.losses(server, data, ctx).argmin())

    def cluster_trained(self, server: State, upload: Upload) -> int:
        return int(upload.message["cluster"])

    def losses(self, server: State, data: ClientData, ctx: Ctx) -> Tensor:
        """What the client compares: the loss of every model."""
        models = [self.model(server, cluster) for cluster in range(self.n_models(server))]
        return torch.stack([self._loss(model, data, ctx) for model in models])

    def update(self, down: Message, memory: State, data: ClientData, ctx: Ctx) -> tuple[Message, State]:
        cluster = self.cluster_of(down, data, ctx)
        own = self._own(memory, cluster, ctx)
        message, kept = super().update(self.model(down, cluster), own, data, ctx)
        return message | {"cluster": torch.tensor([cluster], dtype=torch.int32, device=ctx.task.device)}, kept

    # --- what methods change ---

    def _loss(self, model: State, data: ClientData, ctx: Ctx) -> Tensor:
        """A model's loss, by default over all training data of the client."""
        return summed_loss([model["w"]], data.chunks(ctx.protocol.batch_size), ctx)

    def _own(self, memory: State, cluster: int, ctx: Ctx) -> State:
        """The memory with which a client trains the model of this cluster."""
        return memory


class AssignedByServer(Clustered):
    """The server knows where its clients belong (`assigned`, -1 for one it knows nothing of) and sends each its model.

    A client that it knows nothing of is taken for a member of the largest cluster.
    """

    def cluster_of(self, server: State, data: ClientData, ctx: Ctx) -> int:
        assert ctx.client is not None
        return _assigned(server, ctx.client)

    def cluster_trained(self, server: State, upload: Upload) -> int:
        return _assigned(server, upload.client)

    def download(self, server: State, ctx: Ctx) -> Message:
        assert ctx.client is not None
        return self.model(server, _assigned(server, ctx.client))


def _assigned(server: State, client: int) -> int:
    own = int(server["assigned"][client])
    if own >= 0:
        return own
    known = server["assigned"][server["assigned"] >= 0]
    return int(torch.bincount(known, minlength=1).argmax())


def summed_loss(vectors: Sequence[Tensor], batches: Iterable[tuple[Tensor, Tensor]], ctx: Ctx) -> Tensor:
    """Cross-entropy of networks, summed over them and over all images, without training anything; in float64."""
    net, total = ctx.task.net, torch.zeros((), dtype=torch.float64, device=ctx.task.device)
    with torch.no_grad():
        for x, y in batches:
            for vector in vectors:
                net.load(vector)
                total += cross_entropy(net.logits(x), y, reduction="sum")
    return total

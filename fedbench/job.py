"""A job: method x task x protocol x seed, validated and frozen, with a key that names its content.

Settings are flat (`lr`, `size`, `mu`): every name belongs to exactly one of the job itself, the task, the protocol,
the partition or the method, so that grids, overrides and the command line need no paths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fedbench.errors import FedbenchError, did_you_mean, explain

if TYPE_CHECKING:
    from fedbench.algorithm import Algorithm
    from fedbench.dataset import Dataset
    from fedbench.partition import Partition

ENGINE_VERSION = 1
"""Part of every job key: raise it when the engine's results change, or when a default below changes."""


class Frozen(BaseModel):
    """Validated, unchangeable, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class TaskSpec(Frozen):
    """A data set, cut into clients by a partition, with a model."""

    dataset: str
    clients: int = Field(10, ge=1, description="number of clients N")
    partition: str = Field("labels", description="how the data is cut into clients")
    model: str = Field("dnn100", description="network architecture")
    normalize: str = Field("half", description="pixel scaling: half is (x - 0.5) / 0.5")
    augment: Literal["none", "crop_flip"] = Field(
        "none", description="training images: random crop (padding 4) and flip"
    )
    newcomers: float = Field(
        0, ge=0, description="clients that never train: a random fraction below 1, or the first so many"
    )
    server_fraction: float = Field(
        0, ge=0, lt=1, description="part of every client's training samples that the server holds instead, unlabelled"
    )
    clean: str | None = Field(None, description="also score the global model on the training part of this data set")
    ood: str | None = Field(None, description="data set whose test images are out of distribution: entropies, AUROC")
    train_part: Literal["all", "body"] = Field("all", description="what is trained: the whole network or its body")
    norm: Literal["bn_nostats", "bn_stats", "gn"] = Field(
        "bn_nostats", description="normalisation layers: BatchNorm without or with running statistics, GroupNorm(2)"
    )

    @field_validator("newcomers")
    @classmethod
    def _part_or_number(cls, value: float) -> float:
        if value >= 1 and value != int(value):
            raise ValueError("must be a fraction below 1 or a whole number of clients")
        return value


class Protocol(Frozen):
    """Rounds, local work, participation, and what is evaluated when."""

    rounds: int = Field(100, ge=1, description="communication rounds T")
    f: float = Field(1.0, gt=0, le=1, description="fraction of clients that report in a round")
    train_all: bool = Field(False, description="every client trains in every round, only the sampled ones report")
    local_unit: Literal["epoch", "batch"] = Field("epoch", description="what tau counts: passes or mini-batches")
    tau: int = Field(1, ge=1, description="local work of a client in a round, in local_unit")
    batch_size: int = Field(50, ge=1)
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(0.01, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on lr at rounds T/2 and 3T/4")
    optim_state: Literal["reset", "persistent"] = Field("reset", description="optimiser moments over rounds")
    weighting: Literal["samples", "uniform"] = Field("samples", description="weights of the server's average")
    beta: float = Field(1.0, gt=0, description="server extrapolation: w <- (1-beta) w + beta average")
    eval_every: int = Field(10, ge=1, description="rounds between evaluations outside the rule's window")
    rule: Literal["final", "best_all", "best_last100", "mean_last10", "best_ckpt"] = Field(
        "final", description="which rounds the headline number comes from"
    )
    headline: Literal["accuracy", "macro", "rmse"] = Field(
        "accuracy", description="pooled accuracy, or mean over clients; rmse in regression"
    )
    adapt_epochs: tuple[int, ...] = Field(
        (), description="after training, score every client's adaptation by so many epochs; newcomers' if there are any"
    )
    adapt_from: Literal["best", "final"] = Field("final", description="the state that clients adapt: best GM or final")
    adapt_lr: float | None = Field(None, gt=0, description="rate of the adaptation; default: lr without decay")
    adapt_part: Literal["all", "head"] = Field("all", description="what the adaptation trains")
    novel_rounds: int = Field(
        0, ge=0, description="after training, newcomers run the method's own update so often, the shared part fixed"
    )
    mc_samples: int = Field(10, ge=1, description="weight samples of an MC prediction")
    mc_every: int = Field(0, ge=0, description="also predict with MC every so many rounds; 0: at the end only")

    @property
    def smaller_wins(self) -> bool:
        """Whether the best round is the one with the smallest headline number: an error, not an accuracy."""
        return self.headline == "rmse"

    @field_validator("adapt_epochs", mode="before")
    @classmethod
    def _one_number_or_several(cls, value: Any) -> Any:
        """`--set adapt_epochs=5` and `--set adapt_epochs=0/1/5` are as good as a list."""
        if isinstance(value, str):
            return [part.strip() for part in value.split("/")]
        return [value] if isinstance(value, int) else value

    @field_validator("adapt_epochs")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(epochs < 0 for epochs in value) or list(value) != sorted(set(value)):
            raise ValueError("must be different numbers of epochs, ascending")
        return value


class JobSpec(Frozen):
    """One line of a grid after expansion."""

    method: str
    version: int
    params: dict[str, Any]
    task: TaskSpec
    partition_params: dict[str, Any]
    protocol: Protocol
    seed: int = Field(0, ge=0)
    changed: dict[str, Any] = Field(description="the settings that differ from the defaults; what the key is made of")

    @property
    def settings(self) -> dict[str, Any]:
        """All settings in one flat dictionary, as JSON would hold them."""
        return {
            "method": self.method,
            "seed": self.seed,
            **self.task.model_dump(mode="json"),
            **self.partition_params,
            **self.protocol.model_dump(mode="json"),
            **self.params,
        }

    @property
    def key(self) -> str:
        """Hash of the content; the same for the same job, whatever the order or the way it was written."""
        content = {
            "engine": ENGINE_VERSION,
            "version": self.version,
            "method": self.method,
            "dataset": self.task.dataset,
            "seed": self.seed,
            "changed": self.changed,
        }
        return hashlib.sha256(canonical_json(content).encode()).hexdigest()[:20]

    @property
    def label(self) -> str:
        """A short name for people: method with its own settings, data set, size, seed."""
        own = ",".join(f"{key}={value}" for key, value in sorted(self.changed.items()) if key in self.params)
        method = f"{self.method}[{own}]" if own else self.method
        size = self.partition_params.get("size")
        return " ".join(str(part) for part in (method, self.task.dataset, size, f"seed {self.seed}") if part)


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: one text per content."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class _Identity(Frozen):
    method: str
    seed: int = Field(0, ge=0)


def build_job(settings: Mapping[str, Any]) -> JobSpec:
    """Validate flat settings into a JobSpec; raises FedbenchError that names the wrong key and the way out."""
    from fedbench.dataset import dataset_name, find_dataset
    from fedbench.models import check_model

    for needed, where in (("method", "methods"), ("dataset", "tasks")):
        if needed not in settings:
            raise FedbenchError(f"the job has no {needed}.", f"Name one under `{where}` in the grid.")
    algorithm, partition = _parts(str(settings["method"]), settings.get("partition"))
    dataset = find_dataset(str(settings["dataset"]))

    sections = _sections(algorithm.Params, partition.Params)
    owner = _owners(sections)
    values: dict[type[BaseModel], dict[str, Any]] = {section: {} for section in sections}
    for key, value in {**algorithm.defaults, **settings}.items():
        if key not in owner:
            raise FedbenchError(f"method {settings['method']} has no setting {key!r}.", did_you_mean(key, owner))
        values[owner[key]][key] = value
    names = {
        key: dataset_name(str(values[TaskSpec][key]))
        for key in ("dataset", "clean", "ood")
        if values[TaskSpec].get(key)
    }
    try:
        identity = _Identity.model_validate(values[_Identity])
        task = TaskSpec.model_validate({**values[TaskSpec], **names})
        protocol = Protocol.model_validate(values[Protocol])
        cut = partition.Params.model_validate(values[partition.Params])
        params = algorithm.Params.model_validate(values[algorithm.Params])
    except ValidationError as error:
        raise FedbenchError(f"wrong setting for method {settings['method']}:\n{explain(error)}") from None
    check_model(task.model)
    for other in (task.clean, task.ood):
        if other is not None and find_dataset(other).shape != dataset.shape:
            raise FedbenchError(f"{other} has other images than {dataset.name()}.", "Choose one of the same shape.")

    defaults = {**_defaults(sections), **algorithm.defaults}
    flat = {k: v for part in (task, protocol, cut, params) for k, v in part.model_dump(mode="json").items()}
    job = JobSpec(
        method=identity.method,
        version=algorithm.version,
        params=params.model_dump(mode="json"),
        task=task,
        partition_params=cut.model_dump(mode="json"),
        protocol=protocol,
        seed=identity.seed,
        changed={k: v for k, v in flat.items() if k != "dataset" and (k not in defaults or v != defaults[k])},
    )
    _check_targets(job, algorithm, dataset, partition)
    partition(cut).check(dataset)
    return job


def _check_targets(job: JobSpec, method: type[Algorithm], dataset: type[Dataset], partition: type[Partition]) -> None:
    """Raises FedbenchError when the job needs classes and there are none, or the other way round."""
    from fedbench.algorithm import fits_regression, methods

    if dataset.target_scale is None:
        if job.protocol.headline == "rmse":
            raise FedbenchError(f"headline rmse is for regression; {job.task.dataset} has classes.", "Use accuracy.")
        return
    what = f"{job.task.dataset} is regression"
    if not fits_regression(method):
        able = ", ".join(name for name in methods.names() if fits_regression(methods.get(name)))
        raise FedbenchError(f"{what}, and method {job.method} needs classes.", f"Methods for it: {able}.")
    if not partition.regression:
        raise FedbenchError(f"{what}, and partition {job.task.partition} needs classes.", "Use partition natural.")
    needed = {"headline": "rmse", "normalize": "none", "augment": "none", "clean": None, "ood": None}
    wrong = [f"{key}: {value or 'null'}" for key, value in needed.items() if job.settings[key] != value]
    if wrong:
        raise FedbenchError(f"{what}, and not all settings fit that.", f"Set {', '.join(wrong)}.")


def stored_job(content: Any) -> JobSpec:
    """A job as a database holds it; raises FedbenchError when that is no job."""
    try:
        return JobSpec.model_validate(content)
    except ValidationError as error:
        raise FedbenchError(
            f"the database holds what is no job of this fedbench:\n{explain(error)}",
            "It is damaged, or another fedbench wrote it. Choose another with --db, or restore a backup.",
        ) from None


def default_settings(method: str, partition: str | None = None) -> dict[str, Any]:
    """The settings of a job of this method and partition for which nobody says anything."""
    algorithm, cut = _parts(method, partition)
    return {**_defaults(_sections(algorithm.Params, cut.Params)), **algorithm.defaults}


def known_settings(method: str, partition: str | None = None) -> set[str]:
    """The names of all settings that a job of this method and partition has."""
    algorithm, cut = _parts(method, partition)
    return set(_owners(_sections(algorithm.Params, cut.Params)))


def _parts(method: str, partition: str | None) -> tuple[type[Algorithm], type[Partition]]:
    from fedbench.algorithm import methods  # imports torch: only what builds jobs pays for it
    from fedbench.partition import get_partition

    return methods.get(method), get_partition(str(partition or TaskSpec.model_fields["partition"].default))


def _sections(params: type[BaseModel], cut: type[BaseModel]) -> tuple[type[BaseModel], ...]:
    return (_Identity, TaskSpec, Protocol, cut, params)


def _defaults(sections: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    fields = [(name, field) for section in sections for name, field in section.model_fields.items()]
    plain = {name: list(f.default) if isinstance(f.default, tuple) else f.default for name, f in fields}  # as in JSON
    return {name: plain[name] for name, field in fields if not field.is_required()}


def _owners(sections: tuple[type[BaseModel], ...]) -> dict[str, type[BaseModel]]:
    owner: dict[str, type[BaseModel]] = {}
    for section in sections:
        for name in section.model_fields:
            if name in owner:
                raise FedbenchError(
                    f"{section.__qualname__} of {section.__module__} has a setting {name!r}, "
                    f"which {owner[name].__qualname__} has already.",
                    "Rename it: every setting belongs to one place.",
                )
            owner[name] = section
    return owner

"""The kernel's own answer to every seat but the dataset's and the checkpointer's, as a plugin that is asked last.

Imports are inside the functions because `femto plugins` and `--help` load this file and must not wait for torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from femto_core.config import Config
    from femto_core.data import Collator, Dataset, Loader, TokenSplit
    from femto_core.loss import TaskLoss, TokenStatistics
    from femto_core.mesh import Mesh
    from femto_core.model import FullModel
    from femto_core.optim import LRSchedule
    from femto_core.precision import ParamShare, Precision
    from femto_core.schedule import Schedule
    from femto_core.sharding import ShardingStrategy


@hookimpl
def femto_validate(config: Config) -> None:
    if config.train.stop_after > config.train.steps:
        raise UserError(f"train.stop_after = {config.train.stop_after} lies beyond train.steps = {config.train.steps}")
    if config.optim.warmup >= config.train.steps:
        raise UserError(f"optim.warmup = {config.optim.warmup} must be less than train.steps = {config.train.steps}")
    if config.optim.decay and config.optim.schedule != "wsd":
        raise UserError(f"optim.decay = {config.optim.decay} is for --optim.schedule wsd only")
    if (decay := config.optim.decay) > config.train.steps - config.optim.warmup:
        raise UserError(f"optim.decay = {decay} must fit between optim.warmup and train.steps = {config.train.steps}")
    if any(not 0 <= beta < 1 for beta in config.optim.betas):
        raise UserError(f"optim.betas = {config.optim.betas} must lie in [0, 1)")
    if config.model.attention.startswith("flash") and config.data.micro_batch != 1:
        raise UserError(
            f"model.attention = {config.model.attention!r} keeps documents apart with --data.micro-batch 1 only"
        )


@hookimpl
def femto_collator() -> Collator:
    from femto_core.data import next_token_collator

    return next_token_collator


@hookimpl
def femto_split_tokens(config: Config, mesh: Mesh) -> TokenSplit:
    from femto_core.data import split_evenly

    return split_evenly(config, mesh)


@hookimpl
def femto_loader(config: Config, mesh: Mesh, dataset: Dataset, collator: Collator) -> Loader:
    from femto_core.data import make_loader

    return make_loader(config, mesh, dataset, collator)


@hookimpl
def femto_model(config: Config) -> FullModel:
    from femto_core.architecture import build_model

    return build_model(config.model, config.train.seed)


@hookimpl
def femto_schedule(mesh: Mesh) -> Schedule:
    from femto_core.schedule import Sequential

    return Sequential(mesh)


@hookimpl
def femto_wrap_layer(layer: nn.Module, config: Config) -> None:
    if config.train.compile:
        layer.compile()  # in place: a wrapper would rename the layer's parameters


@hookimpl
def femto_precision(config: Config) -> Precision:
    import torch

    from femto_core.precision import SinglePrecision

    return SinglePrecision({"float32": torch.float32, "float64": torch.float64}[config.train.dtype])


@hookimpl
def femto_sharding(config: Config, mesh: Mesh) -> ShardingStrategy:
    from femto_core.replicated import Replicated

    return Replicated(mesh, config.train.bucket_mib)


@hookimpl
def femto_optimizer(config: Config, shares: Sequence[ParamShare]) -> torch.optim.Optimizer:
    from femto_core.optim import make_adamw

    return make_adamw(shares, config.optim)


@hookimpl
def femto_lr_schedule(config: Config) -> LRSchedule:
    from femto_core.optim import make_lr_schedule

    return make_lr_schedule(config.optim, config.train.steps)


@hookimpl
def femto_token_statistics() -> TokenStatistics:
    from femto_core.loss import ChunkedStatistics

    return ChunkedStatistics()


@hookimpl
def femto_loss() -> TaskLoss:
    from femto_core.loss import CrossEntropy

    return CrossEntropy()

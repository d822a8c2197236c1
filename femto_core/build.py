"""Asks the seats, in the order of the hook table, for a stage and for the parts of a trainer."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch

from femto_core import hookspecs as specs
from femto_core import launch
from femto_core.checkpoint import Stateful
from femto_core.config import Config
from femto_core.data import Dataset, collate_and_split
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.loss import TaskLoss
from femto_core.mesh import Mesh
from femto_core.metrics import Meter
from femto_core.model import FullModel, Stage
from femto_core.plugins import Plugins
from femto_core.precision import ParamShare, Precision
from femto_core.run_folder import make_run_folder
from femto_core.schedule import Schedule
from femto_core.sections import largest_divisor
from femto_core.sharding import ShardingStrategy
from femto_core.trainer import KERNEL_PARTS, Trainer
from femto_core.weights import WeightSource
from femto_ops.differences import first_difference
from femto_ops.fitting import fit
from femto_ops.flops import flops_per_token, known_peak_tflops
from femto_ops.hugging_face import largest_parameter, largest_size
from femto_ops.memory import free_memory, gib

DEFAULT_GLOBAL_BATCH = 16
LARGEST_DEFAULT_MICRO_BATCH = 8


@attrs.frozen(kw_only=True)
class LoadedStage:
    """A stage with its weights in memory, and the strategies that keep them there and run batches through it."""

    stage: Stage
    schedule: Schedule
    precision: Precision
    sharding: ShardingStrategy
    shares: Sequence[ParamShare]

    def close(self) -> None:
        """Undo everything that was attached to the stage."""
        self.sharding.close()
        self.schedule.close()


def build_stage(config: Config, hooks: Hooks, mesh: Mesh, *, model: FullModel, trainable: bool) -> LoadedStage:
    """Build this rank's stage of `model` and load its weights; called by every rank alike.

    It needs no trainer: an inference engine, or a frozen second model beside the trained one, is built by it too.
    Without `trainable` every parameter is frozen, dropout is off, and there are no gradients or masters.
    """
    if not trainable:
        model = attrs.evolve(model, module=copy.deepcopy(model.module).requires_grad_(False))
    schedule = hooks.seat(specs.femto_schedule, config=config, mesh=mesh)
    stage = schedule.partition(model)
    hooks.call(specs.femto_parallelize, stage=stage, mesh=mesh, config=config)
    wrappers = hooks.layer_wrappers()
    for name, layer in list(stage.named_layers()):
        for wrap in wrappers:
            layer = next(iter(wrap(name=name, layer=layer, stage=stage, config=config)), layer)
        stage.set_layer(name, layer)
    precision = hooks.seat(specs.femto_precision, config=config, mesh=mesh)
    sharding = hooks.seat(specs.femto_sharding, config=config, mesh=mesh)
    check_memory(stage, precision, mesh)
    shares = sharding.allocate(stage, precision)
    load_weights(shares, model.weights)
    precision.sync_weights(shares)
    sharding.weights_changed()
    stage.train(trainable)
    return LoadedStage(stage=stage, schedule=schedule, precision=precision, sharding=sharding, shares=shares)


def build_trainer(config: Config, plugins: Plugins) -> Trainer:
    """Build everything that `config` and the active plugins describe; called by every rank of the process group."""
    hooks = Hooks(plugins.manager)
    axes = [axis for some in hooks.collect(specs.femto_mesh_axes, config=config) for axis in some]
    mesh = Mesh(axes, launch.pick_device(), config.train.timeout)
    check_equal_everywhere(mesh, config, plugins)
    set_up_torch(config, mesh)
    run_dir, lock = make_run_folder(config, mesh)
    undo = contextlib.ExitStack()
    undo.callback(lock.release)
    config = fill_batch(config, mesh.size(*mesh.row_axes))

    dataset = hooks.seat(specs.femto_dataset, config=config, split="train")
    held_out = hooks.seat(specs.femto_dataset, config=config, split="held_out")
    check_same_data(mesh, dataset, held_out)
    collate = hooks.seat(specs.femto_collator, config=config)
    split = hooks.seat(specs.femto_split_tokens, config=config, mesh=mesh)
    collator = functools.partial(collate_and_split, collate, split)
    loader = hooks.seat(specs.femto_loader, config=config, mesh=mesh, dataset=dataset, collator=collator)
    config = fill_vocab_size(config, dataset)
    model = hooks.seat(specs.femto_model, config=config)
    check_vocabulary(model.config.vocab_size, dataset, held_out)
    if problem := fit(model.module, config.data.seq_len, getattr(torch, config.train.dtype)):
        raise UserError(problem)
    hooks.call(specs.femto_transform_model, model=model, config=config)
    built = build_stage(config, hooks, mesh, model=model, trainable=True)
    trained = [share for share in built.shares if share.trainable]
    meter = Meter(
        flops_per_token=flops_per_token(model.config, config.data.seq_len),
        tokens_per_step=config.data.global_batch * config.data.seq_len,
        world_size=mesh.world_size,
        device=mesh.device,
        peak_tflops=config.train.peak_tflops or known_peak_tflops(mesh.device),
    )
    trainer = Trainer(
        config=config,
        mesh=mesh,
        hooks=hooks,
        run_dir=run_dir,
        undo=undo,
        stage=built.stage,
        schedule=built.schedule,
        collator=collator,
        loader=loader,
        dataset=dataset,
        held_out=held_out,
        precision=built.precision,
        sharding=built.sharding,
        shares=built.shares,
        update_groups=equally_many(built.precision.update_groups(trained), mesh),
        optimizer=hooks.seat(specs.femto_optimizer, config=config, mesh=mesh, shares=trained),
        lr_schedule=hooks.seat(specs.femto_lr_schedule, config=config),
        statistics=hooks.seat(specs.femto_token_statistics, config=config, mesh=mesh),
        task=check_loss(hooks.seat(specs.femto_loss, config=config, mesh=mesh)),
        checkpointer=hooks.seat(specs.femto_checkpointer, config=config, mesh=mesh),
        meter=meter,
        plugin_versions=plugins.versions,
        model_config=model.config,
        plugin_parts=collect_parts(hooks.collect(specs.femto_checkpoint_state)),
    )
    try:
        resume(trainer)
    except BaseException:
        trainer.close()  # releases the lock too, so that this process may build another trainer
        raise
    return trainer


def load_weights(shares: Sequence[ParamShare], source: WeightSource) -> None:
    """Fill every master with the part of its parameter that this rank owns, and read nothing else."""
    with torch.no_grad():
        for share in shares:
            parts = source.read(share.layout.name, share.layout.owned())
            if parts:
                values = torch.cat([part.reshape(-1) for part in parts])
                share.master.view(-1)[: values.numel()].copy_(values)


def check_equal_everywhere(mesh: Mesh, config: Config, plugins: Plugins) -> None:
    """Refuse ranks that were started with other plugins, versions or settings than rank 0."""
    mine = {"plugins": plugins.versions, "config": config.to_dict()}
    first, *others = mesh.gather_objects(mine)
    for rank, other in enumerate(others, start=1):
        for what in ("plugins", "config"):
            if other[what] != first[what]:
                key, there, here = first_difference(other[what], first[what])
                raise UserError(
                    f"rank {rank} differs from rank 0 in {what}: {key} is {there!r} there and {here!r} on rank 0; "
                    "install and start the same on every machine"
                )


def check_same_data(mesh: Mesh, *datasets: Dataset) -> None:
    """Refuse ranks that opened other rows than rank 0: a copy, or a cache, on another machine may be older."""
    first, *others = mesh.gather_objects([(dataset.fingerprint, len(dataset)) for dataset in datasets])
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise UserError(f"rank {rank} opened other data than rank 0: {other} there and {first} on rank 0")


def set_up_torch(config: Config, mesh: Mesh) -> None:
    """Divide the CPU's cores among the machine's processes, and seed this rank's random generators."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.train.threads or max(1, cores // launch.local_world_size()))
    torch.use_deterministic_algorithms(config.train.deterministic)
    distinct = [axis.name for axis in mesh.axes if axis.distinct_dropout]
    torch.manual_seed(config.train.seed * 1_000_003 + mesh.coordinate(*distinct))


def fill_batch(config: Config, ranks: int) -> Config:
    """Choose `data.global_batch` and `data.micro_batch` where they were left out, for `ranks` that read other rows.

    The first is 16, rounded up to a multiple of what all ranks read at once; the second the largest divisor of a rank's
    share that is at most 8.
    """
    at_once = ranks * max(1, config.data.micro_batch)
    rows = config.data.global_batch or -(-DEFAULT_GLOBAL_BATCH // at_once) * at_once
    micro_batch = config.data.micro_batch or largest_divisor(max(1, rows // ranks), LARGEST_DEFAULT_MICRO_BATCH)
    return attrs.evolve(config, data=attrs.evolve(config.data, global_batch=rows, micro_batch=micro_batch))


def fill_vocab_size(config: Config, dataset: Dataset) -> Config:
    """Give the model the data's vocabulary where its own was left out."""
    if config.model.vocab_size or config.model.path:
        return config
    return attrs.evolve(config, model=attrs.evolve(config.model, vocab_size=dataset.vocab_size))


def check_vocabulary(size: int, *datasets: Dataset) -> None:
    """Refuse data with token ids that a model of `size` rows of embedding does not have.

    A tokenizer may have more tokens than that; where it has, a dataset with a method `largest_id()` is asked for the
    largest that its rows hold.
    """
    for dataset in datasets:
        largest = dataset.vocab_size - 1
        if largest >= size and (ask := getattr(dataset, "largest_id", None)):
            largest = ask()
        if largest >= size:
            raise UserError(
                f"the data holds token ids up to {largest}, the model has only {size} tokens; use the model's own "
                "tokenizer for femto preprocess, or set --model.vocab-size"
            )


def check_memory(stage: Stage, precision: Precision, mesh: Mesh) -> None:
    """Refuse a stage whose weights alone do not fit, even where all ranks of the world share them."""
    needed = sum(p.numel() * precision.dtype_of(name, stage).itemsize for name, p in stage.named_parameters())
    if needed / mesh.world_size > (free := free_memory(mesh.device)):
        size, [largest, _] = largest_size(stage.config.to_dict(), stage.module), largest_parameter(stage.module)
        raise UserError(
            f"the model's weights need {gib(needed)}, and {gib(free)} are free on each of {mesh.world_size} ranks: "
            f"{largest}, of {size}; choose a smaller model, or more ranks"
        )


def equally_many(groups: Sequence[Sequence[ParamShare]], mesh: Mesh) -> list[Sequence[ParamShare]]:
    """Return `groups`, padded with empty groups so that every rank of the world has equally many."""
    most = max(mesh.gather_objects(len(groups)))
    return [*groups, *[()] * (most - len(groups))]


def check_loss(task: TaskLoss) -> TaskLoss:
    """Refuse a loss that does not say what its sums are divided by."""
    if not callable(getattr(task, "weight", None)):
        raise UserError(
            f"the loss {type(task).__name__} has no method weight(batch), which says what its sums are divided by; "
            "for a mean over valid targets it returns batch.valid"
        )
    return task


def resume(trainer: Trainer) -> None:
    """Load the checkpoint that `checkpoint.resume` names, if any."""
    section = trainer.config.checkpoint
    if section.resume == "none":
        if section.weights_only:
            raise UserError("checkpoint.weights_only needs the checkpoint to take them from: --checkpoint.resume PATH")
        return
    if section.resume == "auto":
        # Rank 0 looks for all ranks, because another rank's view of a shared disk may be older.
        path = trainer.mesh.from_first(trainer.checkpointer.latest(trainer.run_dir / "checkpoints"))
        if path is None and section.weights_only:
            raise UserError(
                f"checkpoint.weights_only: {trainer.run_dir} has no checkpoint to take weights from; set "
                "--checkpoint.resume PATH"
            )
    else:
        path = Path(section.resume)
        if not path.is_dir():
            raise UserError(
                f"checkpoint.resume = {section.resume!r} is neither none, auto, nor the folder of a checkpoint"
            )
    if path is not None:
        trainer.resume(path, weights_only=section.weights_only)


def collect_parts(found: Sequence[tuple[str, Stateful]]) -> dict[str, Stateful]:
    """Return plugins' named parts. Raises `UserError` where two have one name, or the kernel's."""
    parts = dict(found)
    names = sorted([*(name for name, _ in found), *KERNEL_PARTS])
    if twice := [name for name, following in itertools.pairwise(names) if name == following]:
        raise UserError(f"two plugins, or a plugin and the kernel, keep a part {twice[0]!r} in checkpoints; rename one")
    return parts

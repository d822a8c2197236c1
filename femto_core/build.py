"""Asks the seats, in the order of the hook table, for the parts of a trainer, and puts them together."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import torch
from filelock import BaseFileLock, FileLock, Timeout

from femto_core import mesh as meshes
from femto_core.checkpoint import Stateful
from femto_core.config import Config
from femto_core.data import Dataset, DistributedDataLoader, DistributedSampler
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.mesh import DP, Mesh
from femto_core.metrics import Meter, flops_per_token, known_peak_tflops
from femto_core.plugins import Plugins
from femto_core.precision import ParamGroup
from femto_core.trainer import KERNEL_PARTS, Trainer
from femto_core.weights import WeightSource

LARGEST_DEFAULT_MICRO_BATCH = 8
LOCK_S = 8.0  # the loader processes of a run that was killed hold its lock until they notice, within 5 s


def build_trainer(config: Config, plugins: Plugins) -> Trainer:
    """Build everything that `config` and the active plugins describe; called by every rank of the process group."""
    hooks = Hooks(plugins.manager)
    mesh = Mesh(hooks.mesh_axes(config), meshes.pick_device())
    check_equal_everywhere(mesh, config, plugins)
    set_up_torch(config, mesh)
    run_dir, lock = make_run_dir(config, mesh)
    undo = contextlib.ExitStack()
    undo.callback(lock.release)
    config = fill_micro_batch(config, mesh)

    dataset, held_out = hooks.dataset(config, "train"), hooks.dataset(config, "held_out")
    check_same_data(mesh, dataset, held_out)
    collator = hooks.collator(config)
    config = fill_vocab_size(config, dataset)
    model = hooks.model(config)
    check_vocabulary(dataset, model.config.vocab_size)
    hooks.transform_model(model, config)
    schedule = hooks.schedule(config, mesh)
    stage = schedule.partition(model)
    hooks.parallelize(stage, mesh, config)
    for name, layer in list(stage.named_layers()):
        stage.set_layer(name, hooks.wrap_layer(name, layer, config))
    precision, sharding = hooks.precision(config), hooks.sharding(config, mesh)
    groups = sharding.make_master(stage, precision)
    load_weights(groups, model.weights)
    precision.sync_weights(groups)
    sharding.gather_weights()
    grad_sync = hooks.grad_sync(config, mesh, sharding)
    grad_sync.attach(stage, precision)
    stage.train()

    sampler = make_sampler(config, mesh, len(dataset))
    loader = DistributedDataLoader(
        dataset,
        sampler,
        collator,
        workers=config.data.workers,
        pin_memory=mesh.device.type == "cuda",
        prefetch=config.data.prefetch,
    )
    meter = Meter(
        flops_per_token=flops_per_token(model.config, config.data.seq_len),
        tokens_per_step=config.data.global_batch * config.data.seq_len,
        world_size=mesh.world_size,
        device=mesh.device,
        peak_tflops=config.log.peak_tflops or known_peak_tflops(mesh.device),
    )
    trainer = Trainer(
        config=config,
        mesh=mesh,
        hooks=hooks,
        run_dir=run_dir,
        undo=undo,
        stage=stage,
        schedule=schedule,
        collator=collator,
        loader=loader,
        dataset=dataset,
        held_out=held_out,
        precision=precision,
        sharding=sharding,
        grad_sync=grad_sync,
        groups=groups,
        optimizer=hooks.optimizer(config, [group for group in groups if group.trainable]),
        lr_schedule=hooks.lr_schedule(config),
        loss=hooks.loss(config, mesh),
        checkpointer=hooks.checkpointer(config, mesh),
        meter=meter,
        plugin_versions=plugins.versions,
        model_config=model.config,
        plugin_parts=collect_parts(hooks.checkpoint_state()),
    )
    try:
        resume(trainer)
    except BaseException:
        trainer.close()  # the lock too: whoever goes on in this process may build another
        raise
    return trainer


def load_weights(groups: Sequence[ParamGroup], source: WeightSource) -> None:
    """Fill every master with the part of its parameter that this rank owns, and read no more than that."""
    with torch.no_grad():
        for group in groups:
            parts = source.read(group.layout.name, group.layout.owned())
            if parts:
                values = torch.cat([part.reshape(-1) for part in parts])
                group.master.view(-1)[: values.numel()].copy_(values)


def check_equal_everywhere(mesh: Mesh, config: Config, plugins: Plugins) -> None:
    """Refuse ranks that were started with other plugins, versions or settings than rank 0."""
    mine = {"plugins": plugins.versions, "config": config.to_dict()}
    first, *others = mesh.gather_objects(mine)
    for rank, other in enumerate(others, start=1):
        for what in ("plugins", "config"):
            if other[what] != first[what]:
                keys = sorted({*first[what], *other[what]})
                key = next(k for k in keys if first[what].get(k) != other[what].get(k))
                raise UserError(
                    f"rank {rank} differs from rank 0 in {what}: {key} is {other[what].get(key)!r} there and "
                    f"{first[what].get(key)!r} on rank 0; install and start the same on every machine"
                )


def check_same_data(mesh: Mesh, *datasets: Dataset) -> None:
    """Refuse ranks that opened other rows than rank 0: a copy on another machine may be older, or a cache another's."""
    first, *others = mesh.gather_objects([(dataset.fingerprint, len(dataset)) for dataset in datasets])
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise UserError(f"rank {rank} opened other data than rank 0: {other} there and {first} on rank 0")


def set_up_torch(config: Config, mesh: Mesh) -> None:
    """Share the CPU's cores out among the machine's processes, and seed this rank's random generators."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(config.train.threads or max(1, cores // meshes.local_world_size()))
    torch.use_deterministic_algorithms(config.train.deterministic)
    # Dropout differs between ranks that see other data; ranks that see the same rows draw alike.
    torch.manual_seed(config.train.seed * 1_000_003 + mesh.coordinate(DP))


def make_run_dir(config: Config, mesh: Mesh) -> tuple[Path, BaseFileLock]:
    """Create the run's folder and lock it on rank 0; return its path. Raises `UserError` rather than mix two runs."""
    name: str = mesh.from_first("" if mesh.rank else config.run.name or _new_name(Path(config.run.dir)))
    folder = Path(config.run.dir) / name
    lock = FileLock(folder / ".lock")
    problem = ""
    if mesh.rank == 0:
        section, checkpoints = config.checkpoint, folder / "checkpoints"
        earlier = (folder / "metrics.jsonl").exists() or any(checkpoints.glob("step-*"))
        own = section.resume == "auto" or checkpoints.resolve() in Path(section.resume).resolve().parents
        if earlier and (section.weights_only or not own):
            problem = (
                f"{folder} holds an earlier run, and this one would not go on with it; choose another --run.name, or "
                "set --checkpoint.resume auto without --checkpoint.weights-only"
            )
        else:
            problem = _take(folder, lock)
    if problem := mesh.from_first(problem):
        raise UserError(problem)
    return folder, lock


def _new_name(runs: Path) -> str:
    """Return the date and time, numbered where another run began in the same second; its folder is made in `runs`."""
    stamp = name = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 1
    while True:
        try:
            (runs / name).mkdir(parents=True)
        except FileExistsError:
            number += 1
            name = f"{stamp}-{number}"
        except OSError:
            return name  # `_take` will say what is wrong
        else:
            return name


def _take(folder: Path, lock: BaseFileLock) -> str:
    """Create `folder` and lock it; return what is wrong, if anything."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=LOCK_S)
    except Timeout:
        return f"another run is writing to {folder}; choose another --run.name"
    except OSError as error:
        return f"run.dir: {folder} cannot be written: {error}"
    return ""


def fill_micro_batch(config: Config, mesh: Mesh) -> Config:
    """Choose `data.micro_batch` where it was left out: the largest divisor of a rank's share that is at most 8."""
    if config.data.micro_batch:
        return config
    share = max(1, config.data.global_batch // mesh.size(DP))
    largest = max(n for n in range(1, LARGEST_DEFAULT_MICRO_BATCH + 1) if share % n == 0)
    return attrs.evolve(config, data=attrs.evolve(config.data, micro_batch=largest))


def fill_vocab_size(config: Config, dataset: Dataset) -> Config:
    """Give the model the data's vocabulary where its own was left out."""
    if config.model.vocab_size or config.model.path:
        return config
    return attrs.evolve(config, model=attrs.evolve(config.model, vocab_size=dataset.vocab_size))


def check_vocabulary(dataset: Dataset, vocab_size: int) -> None:
    """Refuse data with token ids that the model does not have."""
    if dataset.vocab_size > vocab_size:
        raise UserError(
            f"the data uses a vocabulary of {dataset.vocab_size}, the model has only {vocab_size}; use the model's own "
            "tokenizer for femto preprocess, or set --model.vocab-size"
        )


def make_sampler(config: Config, mesh: Mesh, rows: int) -> DistributedSampler:
    """Return the sampler of this rank's place along dp, never of its number in the world."""
    section = config.data
    return DistributedSampler(
        rows=rows,
        global_batch=section.global_batch,
        micro_batch=section.micro_batch,
        dp_size=mesh.size(DP),
        dp_rank=mesh.coordinate(DP),
        seed=config.train.seed,
        shuffle=section.shuffle,
        remainder=section.remainder,
    )


def resume(trainer: Trainer) -> None:
    """Load the checkpoint that `checkpoint.resume` names, if any."""
    section = trainer.config.checkpoint
    if section.resume == "none":
        if section.weights_only:
            raise UserError("checkpoint.weights_only needs the checkpoint to take them from: --checkpoint.resume PATH")
        return
    if section.resume == "auto":
        # One rank looks, lest another's view of a shared disk be older.
        path = trainer.mesh.from_first(trainer.checkpointer.latest(trainer.run_dir / "checkpoints"))
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

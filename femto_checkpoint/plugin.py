"""The built-in checkpoint plugin: the checkpointer seat, `femto export` and `femto checkpoint`."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.checkpoint import Checkpointer
    from femto_core.cli import CommandRegistry
    from femto_core.config import Config
    from femto_core.mesh import Mesh
    from femto_core.trainer import Trainer


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    registry.add("export", "write a checkpoint as a Hugging Face directory", export_command)
    registry.add("checkpoint", "show what is inside a checkpoint", inspect_command)


@hookimpl
def femto_checkpointer(config: Config, mesh: Mesh) -> Checkpointer:
    from femto_checkpoint.store import CheckpointStore

    return CheckpointStore(mesh, config.checkpoint)


@hookimpl
def femto_train_begin(trainer: Trainer) -> None:
    """Have a save that fails stop all ranks after the step under way, by the number that travels in every step."""
    from femto_checkpoint.store import CheckpointStore

    if isinstance(trainer.checkpointer, CheckpointStore):
        trainer.checkpointer.on_failure = functools.partial(setattr, trainer, "stop_requested", True)


@hookimpl
def femto_train_end(trainer: Trainer) -> None:
    """Say so where a signal stopped a run that saves nothing."""
    early = trainer.step < trainer.end
    if early and not trainer.config.checkpoint.every and trainer.mesh.rank == 0 and sys.exc_info()[0] is None:
        print(
            f"stopped after step {trainer.step}, as asked; nothing is saved, because checkpoint.every = 0",
            file=sys.stderr,
            flush=True,
        )


def export_command(words: Sequence[str]) -> int:
    """`femto export CHECKPOINT --output DIR [--dtype ...] [--shard-gib ...]`."""
    import tyro  # this and torch take a while to load

    from femto_checkpoint.export import ExportConfig, export

    path, rest = find_checkpoint("export", words)
    config = tyro.cli(ExportConfig, args=rest, prog="femto export CHECKPOINT", description=ExportConfig.__doc__)
    files = export(path, config)
    print(f"{config.output}: {', '.join(files)}, read back and equal to {path}")
    return 0


def inspect_command(words: Sequence[str]) -> int:
    """`femto checkpoint inspect CHECKPOINT`."""
    from femto_checkpoint.index import Checkpoint

    if words[:1] != ["inspect"]:
        raise UserError("femto checkpoint needs to be told what to do: femto checkpoint inspect CHECKPOINT")
    words = words[1:]
    path, rest = find_checkpoint("checkpoint inspect", words)
    if rest:
        raise UserError(f"femto checkpoint inspect takes one folder, got {rest[0]!r} too")
    index = Checkpoint(path).index
    plugins = ", ".join(index.plugins) or "none"
    print(f"{path}: step {index.step}, saved on {index.layout}, plugins {plugins}")
    for key, value in index.identity.items():
        print(f"  {key} = {value}")
    for name, file in sorted(index.files.items()):
        print(f"  {name}: {file['bytes']:,} bytes")
    masters = {n.partition("/")[2]: t for n, t in index.tensors.items() if n.startswith("master/")}
    kept = sorted({n.partition("/")[0] for n in [*index.tensors, *index.scalars]} - {"master"})
    print(f"  {len(masters)} parameters, {sum(math.prod(t.shape) for t in masters.values()):,} values;", end=" ")
    print(f"the optimizer keeps {', '.join(kept) or 'nothing'}")
    for name, tensor in masters.items():
        print(f"    {name} {list(tensor.shape)} {tensor.dtype}, in {len(tensor.pieces)} piece(s)")
    return 0


def find_checkpoint(command: str, words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the checkpoint that the first word names, itself or as the newest of a run, and the other words."""
    if not words or words[0].startswith("-"):
        raise UserError(f"femto {command} needs a checkpoint: runs/NAME, or runs/NAME/checkpoints/step-N")
    path = Path(words[0])
    if not (path / "checkpoints").is_dir():
        return path, list(words[1:])
    from femto_checkpoint.folder import latest_checkpoint

    newest = latest_checkpoint(path / "checkpoints")
    if newest is None:
        raise UserError(f"{path} has no complete checkpoint; set --checkpoint.every to save some")
    return newest, list(words[1:])

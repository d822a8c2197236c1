"""The built-in checkpoint plugin: the checkpointer seat, `femto export` and `femto checkpoint`."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from femto_core import hookspecs
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_checkpoint.options import CheckpointOptions, ExportOptions
    from femto_core.checkpoint import Checkpointer, ExportTensor
    from femto_core.commands import CommandRegistry
    from femto_core.config import Config
    from femto_core.mesh import Mesh


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    from femto_checkpoint.options import CheckpointOptions, ExportOptions

    export = partial(export_command, Hooks(registry.manager))
    registry.add("export", "write a checkpoint as a Hugging Face directory", ExportOptions, export)
    registry.add("checkpoint", "show what is inside a checkpoint", CheckpointOptions, inspect_command)


@hookimpl
def femto_checkpointer(config: Config, mesh: Mesh) -> Checkpointer:
    from femto_checkpoint.generation import source_generation
    from femto_checkpoint.store import CheckpointStore

    return CheckpointStore(mesh, config.checkpoint, source_generation(config.model))


def export_command(hooks: Hooks, options: ExportOptions) -> int:
    """Write the export, as the active plugins change it, and print its files."""
    from femto_checkpoint.export import export  # this and torch take a while to load
    from femto_checkpoint.tokenizer import other_ids

    path = find_checkpoint(options.checkpoint)
    files = export(path, options, partial(change_tensors, hooks))
    print(f"{options.output}: {', '.join(files)}, read back and equal to {path}")
    if warning := other_ids(Path(options.output)):
        print(f"warning: {warning}", file=sys.stderr)
    return 0


def change_tensors(
    hooks: Hooks, tensors: dict[str, ExportTensor], saved: Mapping[str, ExportTensor], settings: Mapping[str, Any]
) -> None:
    """Ask the active plugins what becomes of each tensor."""
    hooks.call(hookspecs.femto_export, tensors=tensors, saved=saved, settings=settings)


def inspect_command(options: CheckpointOptions) -> int:
    """Print what a checkpoint holds."""
    from femto_checkpoint.index import Checkpoint

    path = find_checkpoint(options.checkpoint)
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


def find_checkpoint(name: str) -> Path:
    """Return the checkpoint of that path, or the newest of the run of that path."""
    path = Path(name)
    if not (path / "checkpoints").is_dir():
        return path
    from femto_checkpoint.folder import latest_checkpoint

    newest = latest_checkpoint(path / "checkpoints")
    if newest is None:
        raise UserError(f"{path} has no complete checkpoint; set --checkpoint.every to save some")
    return newest

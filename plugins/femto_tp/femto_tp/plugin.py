"""The hooks of plugin tp. Imports of torch wait until a run needs them."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.loss import Loss
    from femto_core.mesh import Axis, Mesh
    from femto_core.model import Stage

ORDER = 100
"""Innermost: tensor parallel ranks talk most, and belong on one machine."""


@attrs.frozen(kw_only=True)
class TPSection:
    """Layers cut over several ranks."""

    size: int = attrs.field(default=0, validator=not_negative)
    """Ranks of a tensor parallel group; 0: as many as this machine has, and the key/value heads divide by."""
    sequence_parallel: bool = False
    """Cut what lies between the layers' matrices along the sequence too: less memory, one gather more in backward."""
    plan: dict[str, str] = attrs.field(factory=dict)
    """In TOML: the parallel kind of further modules, by pattern of their names."""


class TensorParallelism:
    """Adds the axis tp, rewrites the stage, and takes the loss seat."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[TPSection]]:
        return "tp", TPSection

    @hookimpl
    def femto_mesh_axes(self, config: Config) -> Sequence[Axis]:
        import torch.distributed as dist

        from femto_core.mesh import Axis, local_world_size
        from femto_tp.cuts import cut_heads

        model = heads_of(config)
        size = config.section(TPSection).size
        if not size:
            world = dist.get_world_size()
            size = math.gcd(world, local_world_size(), model.num_key_value_heads)
            if size == 1 and dist.get_rank() == 0:
                heads = f"{model.num_key_value_heads} key/value heads and {world} processes"
                print(f"tp: nothing divides {heads}, so nothing is cut; see --tp.size", file=sys.stderr, flush=True)
        cut = cut_heads(model, size)
        if not cut.is_even and dist.get_rank() == 0:
            most, least = (f(len(heads) for heads in cut.queries) for f in (max, min))
            print(
                f"tp: {model.num_attention_heads} heads over {size} ranks: {most} on some, {least} on others, who wait",
                file=sys.stderr,
                flush=True,
            )
        return [Axis("tp", size, ORDER)]

    @hookimpl
    def femto_parallelize(self, stage: Stage, mesh: Mesh, config: Config) -> None:
        import torch

        from femto_tp.parallelize import parallelize

        if mesh.size("tp") == 1:
            return
        section = config.section(TPSection)
        if section.sequence_parallel and config.data.seq_len % mesh.size("tp"):
            raise UserError(
                f"tp.sequence_parallel cuts rows of data.seq_len = {config.data.seq_len} tokens into {mesh.size('tp')} "
                "equal parts, which they are not; choose a multiple"
            )
        parallelize(stage, mesh, sequence_parallel=section.sequence_parallel, changes=section.plan)
        # Ranks drop out attention of different heads: each draws its own numbers.
        torch.manual_seed(torch.initial_seed() + 7_919 * mesh.coordinate("tp"))

    @hookimpl
    def femto_loss(self, mesh: Mesh) -> Loss | None:
        from femto_tp.cross_entropy import VocabParallelCrossEntropy

        return VocabParallelCrossEntropy() if mesh.size("tp") > 1 else None


def heads_of(config: Config) -> Any:
    """Return the model's head counts, under transformers' names, before the model is built."""
    if not config.model.path:
        names = {"num_attention_heads": config.model.heads, "num_key_value_heads": config.model.kv_heads}
        return SimpleNamespace(**names, hidden_size=config.model.hidden_size, head_dim=None)
    try:
        raw = json.loads((Path(config.model.path) / "config.json").read_text(encoding="utf-8"))
        heads = int(raw["num_attention_heads"])
        return SimpleNamespace(
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            hidden_size=int(raw["hidden_size"]),
            head_dim=raw.get("head_dim"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"model.path = {config.model.path!r}: config.json does not say how many heads: {error}"
        ) from None

"""The hooks of plugin tp. torch is imported only when a run needs it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.loss import TokenStatistics
    from femto_core.mesh import Axis, Mesh
    from femto_core.model import FullModel, Stage

ORDER = 100
"""Innermost: tensor parallel ranks communicate most, and belong on one machine."""


@attrs.frozen(kw_only=True)
class TPSection:
    """Layers sharded over several ranks."""

    size: int = attrs.field(default=0, validator=not_negative)
    """Ranks of a tensor parallel group; 0: the most on one machine that divide the key/value heads."""
    sequence_parallel: bool = False
    """Also shard norms and residuals along the sequence: less memory, one more gather in backward."""
    plan: dict[str, str] = attrs.field(factory=dict)
    """In TOML: the parallel kinds of other modules, by pattern of their names."""


class TensorParallelism:
    """Adds the axis tp, shards the stage, and takes the seat of token statistics."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[TPSection]]:
        return "tp", TPSection

    @hookimpl
    def femto_mesh_axes(self, config: Config) -> Sequence[Axis]:
        import torch.distributed as dist

        from femto_core.architecture import read_model_config
        from femto_core.launch import local_world_size
        from femto_core.mesh import Axis
        from femto_tp.cuts import cut_heads

        model = read_model_config(config.model)
        size = config.section(TPSection).size
        if not size:
            world = dist.get_world_size()
            size = math.gcd(world, local_world_size(), model.num_key_value_heads)
            if size == 1 and dist.get_rank() == 0:
                heads = f"{model.num_key_value_heads} key/value heads and {world} processes"
                print(f"tp: nothing divides {heads}, so nothing is sharded; see --tp.size", file=sys.stderr, flush=True)
        cut = cut_heads(model, size)
        if not cut.is_even and dist.get_rank() == 0:
            most, least = (f(len(heads) for heads in cut.queries) for f in (max, min))
            print(
                f"tp: {model.num_attention_heads} heads over {size} ranks are uneven: up to {most} heads per rank, "
                f"at least {least}; the smaller ranks idle",
                file=sys.stderr,
                flush=True,
            )
        return [Axis("tp", size, ORDER, "nothing")]

    @hookimpl(trylast=True)  # other plugins' modules may be in the plan
    def femto_transform_model(self, model: FullModel, config: Config) -> None:
        from femto_tp.plan_check import check_plan

        check_plan(model.module, config.section(TPSection).plan)

    @hookimpl
    def femto_parallelize(self, stage: Stage, mesh: Mesh, config: Config) -> None:
        from femto_tp.parallelize import parallelize

        size, length = mesh.size("tp"), config.data.seq_len // mesh.size(*mesh.token_axes)
        if size == 1:
            return
        section = config.section(TPSection)
        if section.sequence_parallel and length % size:
            raise UserError(
                f"tp.sequence_parallel needs rows of a multiple of {size} tokens, and a rank's rows have {length}; set "
                "--data.seq-len to a multiple"
            )
        parallelize(stage, mesh, sequence_parallel=section.sequence_parallel, changes=section.plan)

    @hookimpl
    def femto_token_statistics(self, mesh: Mesh) -> TokenStatistics | None:
        from femto_tp.token_statistics import VocabParallelStatistics

        return VocabParallelStatistics() if mesh.size("tp") > 1 else None

"""The hooks of plugin bf16. Imports of torch wait until a run needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import positive

if TYPE_CHECKING:
    from femto_core.config import Config
    from femto_core.mesh import Mesh
    from femto_core.precision import Precision

Dtype = Literal["bfloat16", "float32"]


@attrs.frozen(kw_only=True)
class BF16Section:
    """bf16 compute with fp32 masters: in which dtypes gradients add up and travel."""

    accumulate_dtype: Dtype = "float32"
    """Element type in which gradients add up over micro-batches; bfloat16 loses small addends."""
    reduce_dtype: Dtype = "bfloat16"
    """Element type in which gradients travel between ranks."""
    group_mib: float = attrs.field(default=64.0, validator=positive)
    """MiB of masters to update at a time: gradients exist in fp32 only for so many."""


class BF16:
    """Takes the precision seat."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[BF16Section]]:
        return "bf16", BF16Section

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        import torch

        section = config.section(BF16Section)
        if section.accumulate_dtype == "bfloat16" and section.reduce_dtype == "float32":
            raise UserError(
                "bf16.reduce_dtype = 'float32' has nothing to keep of gradients that add up with "
                "bf16.accumulate_dtype = 'bfloat16'; set both to float32"
            )
        cuda = torch.cuda.is_available()
        if cuda and config.train.dtype == "float32" and not torch.cuda.is_bf16_supported(including_emulation=False):
            name = torch.cuda.get_device_name()
            raise UserError(f"{name} does not compute in bf16 (Ampere and later do); train without plugin bf16")

    @hookimpl
    def femto_precision(self, config: Config, mesh: Mesh) -> Precision:
        import torch

        from femto_precision.manager import MixedPrecision

        section = config.section(BF16Section)
        group_bytes = int(section.group_mib * 2**20)
        if config.train.dtype == "float64":  # for verification: the same roles, exact to the last digits
            f64 = torch.float64
            return MixedPrecision(
                compute=f64, master=f64, accumulate=f64, reduce=f64, group_bytes=group_bytes, mesh=mesh
            )
        known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
        return MixedPrecision(
            compute=torch.bfloat16,
            master=torch.float32,
            accumulate=known[section.accumulate_dtype],
            reduce=known[section.reduce_dtype],
            group_bytes=group_bytes,
            mesh=mesh,
        )

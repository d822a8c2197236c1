"""The options of `femto export` and `femto checkpoint`, in a file of their own: --help loads nothing heavy."""

from __future__ import annotations

from typing import Literal

import attrs

from femto_core.sections import at_home, positive


@attrs.frozen(kw_only=True)
class ExportConfig:
    """The form of an export."""

    output: str = attrs.field(converter=at_home)
    """Directory to write; must not exist, or be empty."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Element type of the weights."""
    shard_gib: float = attrs.field(default=5.0, validator=positive)
    """Largest size of one file in GiB."""


@attrs.frozen(kw_only=True)
class ExportOptions(ExportConfig):
    """Write a checkpoint's weights as a Hugging Face directory that `from_pretrained` loads."""

    checkpoint: str = attrs.field(metadata={"positional": True}, converter=at_home)
    """runs/NAME for the newest checkpoint of a run, or runs/NAME/checkpoints/step-N."""


@attrs.frozen(kw_only=True)
class CheckpointOptions:
    """Show what is inside a checkpoint."""

    action: Literal["inspect"] = attrs.field(metadata={"positional": True})
    """The word inspect."""
    checkpoint: str = attrs.field(metadata={"positional": True}, converter=at_home)
    """runs/NAME for the newest checkpoint of a run, or runs/NAME/checkpoints/step-N."""

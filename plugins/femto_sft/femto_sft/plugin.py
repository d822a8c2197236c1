"""The hooks of plugin sft. torch and transformers are imported only when a run needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import OptimSection
from femto_sft.section import InspectOptions, SFTSection

if TYPE_CHECKING:
    from femto_core.commands import CommandRegistry
    from femto_core.config import Config
    from femto_core.data import Collator, Dataset
    from femto_core.model import FullModel
    from femto_core.plugins import Plugins
    from femto_sft.cache import PackedRows


LR = OptimSection().lr / 10
"""Default peak learning rate: one order of magnitude below training from scratch."""


class SupervisedFineTuning:
    """Claims the seats of dataset and collator, and adds `femto sft-inspect`."""

    def __init__(self) -> None:
        self._packed: dict[tuple[SFTSection, int, str], PackedRows] = {}
        """The run's rows, by section, row length and model path."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[SFTSection]]:
        return "sft", SFTSection

    @hookimpl
    def femto_config_defaults(self) -> dict[str, dict[str, Any]]:
        return {"data": {"remainder": "pad"}, "optim": {"lr": LR}}

    @hookimpl
    def femto_commands(self, registry: CommandRegistry) -> None:
        text = "show conversations token by token, and what of them is trained"
        registry.add("sft-inspect", text, InspectOptions, inspect_command, takes_run=True)

    @hookimpl
    def femto_validate(self, config: Config) -> None:
        section = config.section(SFTSection)
        if not section.path:
            raise UserError("plugin sft needs conversations: --sft.path FILE.jsonl, or a Hugging Face dataset")
        if config.data.path:
            raise UserError(f"data.path = {config.data.path!r} has no effect with plugin sft; set sft.path only")
        if not section.tokenizer and not config.model.path:
            raise UserError("plugin sft needs the model's tokenizer: set model.path, or sft.tokenizer")

    @hookimpl
    def femto_dataset(self, config: Config, split: str) -> Dataset:
        import torch.distributed as dist

        from femto_sft.cache import packed_rows, report
        from femto_sft.rows import ConversationRows

        section, seq_len, model = wanted = config.section(SFTSection), config.data.seq_len, config.model.path
        # Finding the rows reads all source files for their digests, so the held-out split reuses what train found.
        if split == "train" or wanted not in self._packed:
            self._packed = {wanted: packed_rows(section, seq_len=seq_len, model=model)}
        packed = self._packed[wanted]
        if split == "train" and (not dist.is_initialized() or dist.get_rank() == 0):
            for line in [*report(packed), *advice(config)]:
                print(f"sft      {line}", flush=True)
        return ConversationRows(packed.directory, split)

    @hookimpl
    def femto_collator(self) -> Collator:
        from femto_sft.collator import collate

        return collate

    @hookimpl
    def femto_transform_model(self, model: FullModel, config: Config) -> None:
        from femto_ops.isolation import leak_between_documents

        packing = config.section(SFTSection).packing
        if packing != "pad" and (leak := leak_between_documents(model.module)):
            raise UserError(f"sft.packing = {packing!r} packs conversations, but {leak}: --sft.packing pad")


def inspect_command(options: InspectOptions, config: Config, plugins: Plugins) -> int:
    """Print the conversations and counts of a run."""
    from femto_sft.inspection import inspect_run  # loads torch and transformers

    return inspect_run(config, options.show)


def advice(config: Config) -> list[str]:
    """Return warnings about settings that suit training from scratch but not fine-tuning."""
    lines = []
    if config.optim.lr >= OptimSection().lr:
        lines.append(
            f"WARNING  optim.lr = {config.optim.lr:g} suits training from scratch; fine-tuning takes half to one order "
            f"of magnitude less, such as --optim.lr {LR:g}"
        )
    if config.data.remainder == "drop":
        lines.append("data.remainder = drop leaves up to a batch of rows out of each epoch; pad trains them too")
    return lines

"""Jobs for workers: training on the plugin's own rows, and on conversations one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
import torch.nn.functional as F

from femto_core.batch import IGNORE_INDEX
from femto_core.config import Config
from femto_core.data import Collator, Dataset, DistributedDataLoader
from femto_core.hookspecs import hookimpl
from femto_core.trainer import Trainer
from femto_sft.plugin import SupervisedFineTuning
from femto_sft.rows import Row
from femto_sft.section import SFTSection
from femto_tools.testing import RandomTask, make_trainer

Values = dict[str, dict[str, Any]]


@attrs.frozen
class ConversationTask(RandomTask):
    """The harness's task: the plugin's own rows and batches."""

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[SFTSection]]:
        return SupervisedFineTuning().femto_config_section()

    @hookimpl
    def femto_dataset(self, config: Config, split: str) -> Dataset:  # type: ignore[override]
        return SupervisedFineTuning().femto_dataset(config, split)

    @hookimpl
    def femto_collator(self) -> Collator:
        return SupervisedFineTuning().femto_collator()


def start(values: Values) -> Trainer:
    """Build a trainer of conversations in this process."""
    return make_trainer(values, (), {"random_task": ConversationTask()})


def documents(row: Row) -> Iterator[slice]:
    """Yield the span of each document of a row, including padding."""
    begin = 0
    for length in row.lengths:
        yield slice(begin, begin + length)
        begin += length


def one_by_one(values: Values) -> dict[str, float]:
    """Return the distance of a step on packed rows from plain transformers on each conversation alone."""
    trainer = start(values)
    assert isinstance(trainer.loader, DistributedDataLoader)
    rows: list[Row] = [trainer.dataset[i] for i in trainer.loader.sampler.global_rows(0) if i >= 0]
    batch = trainer.collator(rows)
    with torch.no_grad():
        packed = trainer.stage.head(trainer.stage.forward(batch.input_ids, batch))
    plain = plain_model(trainer)
    logits_gap, loss, count = 0.0, torch.zeros((), dtype=torch.float64), 0
    for number, row in enumerate(rows):
        for place in documents(row):
            ids = row.ids[place]
            logits = plain(input_ids=ids[None], use_cache=False).logits[0]
            logits_gap = max(logits_gap, float((logits - packed[number, place]).detach().abs().max()))
            targets = ids.masked_fill(~row.trained[place], IGNORE_INDEX)[1:]
            loss = loss + F.cross_entropy(logits[:-1], targets, ignore_index=IGNORE_INDEX, reduction="sum")
            count += int((targets != IGNORE_INDEX).sum())
    (loss / count).backward()  # type: ignore[no-untyped-call]
    gradients: dict[str, torch.Tensor] = {}
    trainer.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(
            {g.name: g.master.grad.clone() for g in trainer.shares if g.master.grad is not None}
        )
    )
    info = trainer.train_step()
    trainer.close()
    theirs = {name: p.grad for name, p in plain.named_parameters()}
    worst = max(float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in theirs.items())
    return {"logits": logits_gap, "gradients": worst, "loss": abs(info.loss - loss.item() / count), "count": count}


def plain_model(trainer: Trainer) -> Any:
    """Return transformers' own model with the trainer's weights, in float64 throughout."""
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    plain: Any = make(trainer.stage.config, attn_implementation="sdpa", dtype=torch.float64)
    weights = {group.name: group.master.detach().clone() for group in trainer.shares}
    plain.load_state_dict(weights, strict=not trainer.stage.config.tie_word_embeddings)
    for module in plain.modules():
        if hasattr(module, "variance_epsilon"):  # its own norm computes in fp32
            module.forward = _norm_in_float64.__get__(module)
    return plain.eval()


def _norm_in_float64(norm: Any, hidden: torch.Tensor) -> Any:
    return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)

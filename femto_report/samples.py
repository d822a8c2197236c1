"""Text continued by the model while it trains: shown on rank 0 and kept in samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from femto_core.hookspecs import hookimpl
from femto_core.sections import not_negative, positive
from femto_report.jsonl import keep_lines

if TYPE_CHECKING:
    import torch

    from femto_core.metrics import StepInfo
    from femto_core.trainer import Trainer


FILE = "samples.jsonl"


@attrs.frozen(kw_only=True)
class SampleSection:
    """Text continued by the model while it trains."""

    every: int = attrs.field(default=0, validator=not_negative)
    """Steps between samples; 0: only before the first step and after the last."""
    prompts: tuple[str, ...] = ("def ", "class ", "import ")
    """Texts to continue; none: no samples."""
    tokens: int = attrs.field(default=40, validator=positive)
    """Tokens to add to each prompt."""
    temperature: float = attrs.field(default=0.7, validator=not_negative)
    """Divides the logits before drawing; 0: always the likeliest token."""


class Samples:
    """Continues `sample.prompts` before the first step, every `sample.every` steps, and after the last."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._prompts: list[tuple[str, list[int]]] = []
        self._end_id: int | None = None

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[SampleSection]]:
        return "sample", SampleSection

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        path, prompts = trainer.dataset.tokenizer_path, trainer.config.section(SampleSection).prompts
        if trainer.mesh.rank == 0 and prompts and (path / "tokenizer_config.json").exists():
            from femto_data.tokenizer import read_tokenizer  # loads transformers

            self._tokenizer = read_tokenizer(str(path))
            self._end_id = self._tokenizer.eos_token_id
            ids = [self._tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
            self._prompts = list(zip(prompts, ids, strict=True))
            keep_lines(trainer.run_dir / FILE, trainer.step - 1)  # the samples of this step are about to come
        # Drawing takes every rank, and another machine may not have the tokenizer.
        self._prompts, self._end_id = trainer.mesh.from_first((self._prompts, self._end_id))
        self._show(trainer, trainer.step)

    @hookimpl
    def femto_step_end(self, trainer: Trainer, info: StepInfo) -> None:
        every = trainer.config.section(SampleSection).every
        if info.step == trainer.end or (every and info.step % every == 0):
            self._show(trainer, info.step)

    def _show(self, trainer: Trainer, step: int) -> None:
        section = trainer.config.section(SampleSection)
        for number, (prompt, ids) in enumerate(self._prompts):
            if not ids:
                continue
            new = continue_tokens(
                trainer,
                ids,
                count=section.tokens,
                temperature=section.temperature,
                seed=trainer.config.train.seed + 1000 * step + number,
                end_id=self._end_id,
            )
            if trainer.mesh.rank == 0:
                text = self._tokenizer.decode(new)
                print(f"sample   step {step}  {prompt!r} -> {text!r}", flush=True)
                with (trainer.run_dir / FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")


def continue_tokens(
    trainer: Trainer, ids: Sequence[int], *, count: int, temperature: float, seed: int, end_id: int | None
) -> list[int]:
    """Return up to `count` tokens that the model puts after `ids`; `end_id` ends them early and is left out.

    Every rank calls this and gets the tokens that rank 0 draws with a generator seeded by `seed`. For each token the
    whole text runs through the model: this needs no cache, and works with any schedule and sharding.
    """
    import torch

    from femto_core.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    tokens = list(ids)
    longest = int(getattr(trainer.stage.config, "max_position_embeddings", len(ids) + count))
    with trainer.stage.evaluating():
        for _ in range(count):
            window = torch.tensor([tokens[-longest:]])
            batch = Batch(input_ids=window, targets=window, position_ids=torch.arange(window.shape[1])[None])
            logits = trainer.schedule.forward(trainer.stage, batch, lambda hidden, head: head(hidden[:, -1])[0])
            # Ranks must agree on when to stop, or some would wait in a collective for ever.
            token = trainer.mesh.from_first(draw(logits.float().cpu(), temperature, generator))
            if token == end_id:
                break
            tokens.append(token)
    return tokens[len(ids) :]


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw one token from `logits` [v]; at temperature 0, return the likeliest."""
    import torch

    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))

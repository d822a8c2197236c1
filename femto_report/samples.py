"""Text continued by the model while it trains: shown on rank 0 and kept in samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from femto_core.hookspecs import hookimpl
from femto_report.lines import keep_lines

if TYPE_CHECKING:
    import torch

    from femto_core.metrics import StepInfo
    from femto_core.trainer import Trainer


FILE = "samples.jsonl"


class Samples:
    """Continues `sample.prompts` before the first step, every `sample.every` steps, and after the last."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._tokenizer: Any = None
        self._prompts: list[tuple[str, list[int]]] = []
        self._end_id: int | None = None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        path = trainer.dataset.tokenizer_path
        if trainer.mesh.rank == 0 and trainer.config.sample.prompts and (path / "tokenizer_config.json").exists():
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(path)
            self._end_id = self._tokenizer.eos_token_id
            ids = [self._tokenizer(p, add_special_tokens=False)["input_ids"] for p in trainer.config.sample.prompts]
            self._prompts = list(zip(trainer.config.sample.prompts, ids, strict=True))
            keep_lines(trainer.run_dir / FILE, trainer.step - 1)  # those of this step are about to come
        # Drawing takes every rank, and another machine may not have the tokenizer.
        self._prompts, self._end_id = trainer.mesh.from_first((self._prompts, self._end_id))
        self._trainer = trainer
        self._show(trainer.step)

    @hookimpl
    def femto_step_end(self, info: StepInfo) -> None:
        if self._trainer is None:
            return
        every = self._trainer.config.sample.every
        if info.step == self._trainer.end or (every and info.step % every == 0):
            self._show(info.step)

    @hookimpl
    def femto_train_end(self) -> None:
        self._trainer = self._tokenizer = None
        self._prompts = []

    def _show(self, step: int) -> None:
        assert self._trainer is not None
        trainer, section = self._trainer, self._trainer.config.sample
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
    """Return up to `count` tokens that the model puts after `ids`, ending early before `end_id`.

    Every rank calls this and gets the tokens that rank 0 draws, with a generator of its own. Each token runs the whole
    text through the model, which needs no cache and works with any schedule and sharding.
    """
    import torch

    from femto_core.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    tokens = list(ids)
    longest = int(getattr(trainer.stage.config, "max_position_embeddings", len(ids) + count))
    trainer.stage.train(False)
    for _ in range(count):
        window = torch.tensor([tokens[-longest:]])
        positions = torch.arange(window.shape[1])[None]
        batch = Batch(input_ids=window, targets=window, position_ids=positions, document_ids=torch.zeros_like(window))
        logits = trainer.schedule.forward(trainer.stage, batch, lambda hidden, head: head(hidden[:, -1])[0])
        # Ranks must agree on when to stop, or some would wait in a collective for ever.
        token = trainer.mesh.from_first(draw(logits.float().cpu(), temperature, generator))
        if token == end_id:
            break
        tokens.append(token)
    trainer.stage.train(True)
    return tokens[len(ids) :]


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw one token from `logits` [v]; at a temperature of 0 the likeliest."""
    import torch

    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))

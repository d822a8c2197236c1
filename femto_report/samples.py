"""Text continued by the model while it trains: shown on rank 0 and kept in samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    import torch

    from femto_core.metrics import StepInfo
    from femto_core.trainer import Trainer


class Samples:
    """Continues `sample.prompts` before the first step, every `sample.every` steps, and after the last."""

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._tokenizer: Any = None

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        if not trainer.config.sample.prompts or not (trainer.dataset.tokenizer_path / "tokenizer_config.json").exists():
            return
        from transformers import AutoTokenizer

        self._trainer = trainer
        self._tokenizer = AutoTokenizer.from_pretrained(trainer.dataset.tokenizer_path)
        self._show(trainer.step)

    @hookimpl
    def femto_step_end(self, info: StepInfo) -> None:
        if self._trainer is None:
            return
        section = self._trainer.config
        end = section.train.stop_after or section.train.steps
        if info.step == end or (section.sample.every and info.step % section.sample.every == 0):
            self._show(info.step)

    @hookimpl
    def femto_train_end(self) -> None:
        self._trainer = self._tokenizer = None

    def _show(self, step: int) -> None:
        assert self._trainer is not None
        trainer, section = self._trainer, self._trainer.config.sample
        for number, prompt in enumerate(section.prompts):
            ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
            if not ids:
                continue
            new = continue_tokens(
                trainer,
                ids,
                count=section.tokens,
                temperature=section.temperature,
                seed=trainer.config.train.seed + 1000 * step + number,
                end_id=self._tokenizer.eos_token_id,
            )
            text = self._tokenizer.decode(new)
            if trainer.mesh.rank == 0:
                print(f"sample   step {step}  {prompt!r} -> {text!r}", flush=True)
                with (trainer.run_dir / "samples.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")


def continue_tokens(
    trainer: Trainer, ids: Sequence[int], *, count: int, temperature: float, seed: int, end_id: int | None
) -> list[int]:
    """Return up to `count` tokens that the model puts after `ids`, ending early before `end_id`.

    Every rank calls this and draws the same tokens: the numbers come from a generator of their own. Each token runs the
    whole text through the model, which needs no cache and works with any schedule and sharding.
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
        # Ranks must agree on when to stop, or some would wait in a collective for ever: rank 0 draws.
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

"""Text continued by the model while it trains: shown on rank 0 and kept in samples.jsonl."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl
from femto_core.sections import check, not_negative, positive
from femto_report.jsonl import LineFile, keep_lines
from femto_report.writing import Writing, say

if TYPE_CHECKING:
    import torch

    from femto_core.metrics import StepInfo
    from femto_core.trainer import Trainer


FILE = "samples.jsonl"
SIGN_OF_LIFE_S = 10.0


@attrs.frozen(kw_only=True)
class SampleSection:
    """Text continued by the model while it trains."""

    every: int = attrs.field(default=0, validator=not_negative)
    """Steps between samples; 0: only before the first step and after the last."""
    prompts: tuple[str, ...] = ("def ", "class ", "import ")
    """Texts to continue; none: no samples."""
    tokens: int = attrs.field(default=40, validator=positive)
    """Tokens to add to each prompt, as far as the model's context allows."""
    temperature: float = attrs.field(
        default=0.7, validator=check(lambda v: v == 0 or v >= 1e-3, "must be 0, or at least 0.001")
    )
    """Divides the logits before drawing; 0: always the likeliest token."""


class Samples:
    """Continues `sample.prompts` before the first step, every `sample.every` steps, and after the last."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._prompts: list[tuple[str, list[int]]] = []
        self._end_id: int | None = None
        self._writing = Writing()

    @hookimpl
    def femto_config_section(self) -> tuple[str, type[SampleSection]]:
        return "sample", SampleSection

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        path, prompts = trainer.dataset.tokenizer_path, trainer.config.section(SampleSection).prompts
        problem = ""
        if trainer.mesh.rank == 0 and prompts and (path / "tokenizer_config.json").exists():
            from femto_data.tokenizer import read_tokenizer  # loads transformers

            self._tokenizer = read_tokenizer(str(path))
            self._end_id = self._tokenizer.eos_token_id
            ids = [self._tokenizer(p, add_special_tokens=False)["input_ids"] for p in prompts]
            self._prompts = list(zip(prompts, ids, strict=True))
            self._writing = Writing()
            problem = self._keep_samples(trainer.run_dir / FILE, trainer.step - 1)
        # Drawing takes every rank, and another machine may not have the tokenizer.
        self._prompts, self._end_id, problem = trainer.mesh.from_first((self._prompts, self._end_id, problem))
        if problem:
            raise UserError(problem)
        longest, asked = context_of(trainer), trainer.config.section(SampleSection).tokens
        if trainer.mesh.rank == 0 and any(len(ids) + asked > longest for _, ids in self._prompts):
            say(f"sample   sample.tokens = {asked}: samples end where the model's context of {longest} tokens does")
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
                say(f"sample   step {step}  {prompt!r} -> {text!r}")
                self._keep(trainer.run_dir / FILE, {"step": step, "prompt": prompt, "text": text})

    def _keep_samples(self, path: Path, last: int) -> str:
        """Keep the samples up to step `last`: those of the next are about to come. Return what is wrong, if so."""
        try:
            with self._writing.to(path):
                keep_lines(path, last)
        except UserError as error:
            return str(error)
        return ""

    def _keep(self, path: Path, sample: dict[str, Any]) -> None:
        with self._writing.to(path), contextlib.closing(LineFile(path)) as file:
            file.append(sample)


def continue_tokens(
    trainer: Trainer, ids: Sequence[int], *, count: int, temperature: float, seed: int, end_id: int | None
) -> list[int]:
    """Return up to `count` tokens that the model puts after `ids`; `end_id` ends them early and is left out.

    They end where the model's context does, and where its logits are not finite.
    Every rank calls this and gets the tokens that rank 0 draws with a generator seeded by `seed`. For each token the
    whole text runs through the model: this needs no cache, and works with any schedule and sharding.
    """
    import torch

    from femto_core.batch import Batch

    generator = torch.Generator().manual_seed(seed)
    tokens = list(ids)
    count, said = min(count, context_of(trainer) - len(ids)), time.monotonic()
    with trainer.stage.evaluating():
        for number in range(count):
            if trainer.mesh.rank == 0 and time.monotonic() - said > SIGN_OF_LIFE_S:
                said = time.monotonic()
                say(f"sample   step {trainer.step}: {number} of {count} tokens so far")
            window = torch.tensor([tokens])
            batch = Batch(input_ids=window, targets=window, position_ids=torch.arange(window.shape[1])[None])
            logits = trainer.schedule.forward(trainer.stage, batch, lambda hidden, head: head(hidden[:, -1])[0])
            # Ranks must agree on when to stop, or some would wait in a collective for ever.
            token = trainer.mesh.from_first(draw(logits.float().cpu(), temperature, generator))
            if token is None or token == end_id:
                break
            tokens.append(token)
    return tokens[len(ids) :]


def context_of(trainer: Trainer) -> int:
    """Return the most tokens that the model takes: those of a row, or what a loaded model says of itself."""
    longest = getattr(trainer.stage.config, "max_position_embeddings", None) if trainer.config.model.path else None
    return int(longest or trainer.config.data.seq_len)


def draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int | None:
    """Draw one token from `logits` [v]; at temperature 0, return the likeliest. None: a logit is not a number."""
    import torch

    if logits.isnan().any():
        return None
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))

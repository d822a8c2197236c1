"""What every contender trains: one small Llama, from one seed, on one stream of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import LlamaConfig

from femto_core.data import next_token_collator
from femto_core.hookspecs import hookimpl
from femto_data.plugin import NoRows


@attrs.frozen(kw_only=True)
class Workload:
    """Sizes of the model and of a step."""

    hidden: int = 512
    intermediate: int = 1408
    layers: int = 8
    heads: int = 8
    kv_heads: int = 4
    vocab: int = 8192
    seq: int = 256
    batch: int = 8
    accumulation: int = 2
    steps: int = 12
    warmup: int = 3
    lr: float = 3e-4
    narrow: str = "bfloat16"
    """The dtype of what contenders compute in bf16, or float32 on a machine whose bf16 products are slower."""

    @property
    def narrow_dtype(self) -> torch.dtype:
        """`narrow` as torch's dtype."""
        dtype: torch.dtype = getattr(torch, self.narrow)
        return dtype

    def llama(self) -> LlamaConfig:
        """Return the model's config for transformers."""
        make: Any = LlamaConfig
        config: LlamaConfig = make(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=max(self.seq, 128),
            tie_word_embeddings=False,
            attn_implementation="sdpa",
            use_cache=False,
        )
        return config

    def steps_of_rows(self) -> Iterator[torch.Tensor]:
        """Yield each step's rows [batch, seq + 1]: a skewed unigram stream, so that there is something to learn."""
        generator = torch.Generator().manual_seed(1234)
        weights = 1.0 / torch.arange(1, self.vocab + 1, dtype=torch.float)
        while True:
            flat = torch.multinomial(weights, self.batch * (self.seq + 1), replacement=True, generator=generator)
            yield flat.view(self.batch, self.seq + 1)

    def settings(self, world_size: int) -> dict[str, dict[str, Any]]:
        """Return the same workload as femto's settings."""
        total = self.steps + self.warmup
        return {
            "train": {"steps": total, "threads": 1},
            "model": {
                "hidden_size": self.hidden,
                "intermediate_size": self.intermediate,
                "layers": self.layers,
                "heads": self.heads,
                "kv_heads": self.kv_heads,
                "vocab_size": self.vocab,
                "tied": False,
            },
            "data": {
                "seq_len": self.seq,
                "global_batch": self.batch,
                "micro_batch": self.batch // world_size // self.accumulation,
                "shuffle": False,
            },
            "optim": {"lr": self.lr, "warmup": 1, "schedule": "constant"},
            "eval": {"every": 0},
        }


class StreamTask:
    """A plugin that takes the data seats with the workload's stream."""

    def __init__(self, workload: Workload) -> None:
        stream = workload.steps_of_rows()
        self._rows = torch.cat([next(stream) for _ in range(workload.steps + workload.warmup)])
        self._vocab = workload.vocab

    @hookimpl
    def femto_dataset(self, split: str) -> Any:
        return StreamRows(self._rows, self._vocab) if split == "train" else NoRows()

    @hookimpl
    def femto_collator(self) -> Any:
        return next_token_collator


@attrs.frozen(eq=False)
class StreamRows:
    """The stream's rows by index."""

    rows: torch.Tensor
    vocab_size: int
    tokenizer_path: Path = Path("none")
    fingerprint: str = "stream"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]

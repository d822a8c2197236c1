"""The kernel's own config sections: every setting, its default, its range, and its sentence in --help.

Sections of built-in plugins stand beside their plugins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

import attrs

from femto_ops.paths import is_folder_name


class OutOfRange(ValueError):  # noqa: N818
    """A value of the right type that the field does not allow."""

    def __init__(self, field: str, reason: str) -> None:
        self.field = field
        super().__init__(reason)


def check(accepts: Callable[[Any], bool], reason: str) -> Callable[[Any, attrs.Attribute[Any], Any], None]:
    """Return an attrs validator that refuses what `accepts` does not, with `reason` ("must be positive")."""

    def validate(_instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not accepts(value):
            raise OutOfRange(attribute.name, reason)

    return validate


def at_home(path: Any) -> Any:
    """Return a path, or a tuple of paths, with ~ expanded: the converter of settings that are paths."""
    return tuple(map(os.path.expanduser, path)) if isinstance(path, tuple) else os.path.expanduser(path)


positive = check(lambda v: v > 0, "must be greater than 0")
not_negative = check(lambda v: v >= 0, "must not be negative")
share = check(lambda v: 0 <= v < 1, "must lie in [0, 1)")
wide = check(
    lambda v: v in ("float32", "float64"),
    "must be float32 or float64; to compute in a narrower one, add a precision plugin to float32 "
    "(femto plugins lists who takes that seat)",
)


def fit(adapt: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return the metadata of a field whose default depends on other settings.

    `adapt(default, config)` returns the value to take where nobody gave one. Fields are adapted in their order.
    """
    return {"fit": adapt}


def largest_divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`."""
    return max(n for n in range(1, most + 1) if number % n == 0)


@attrs.frozen(kw_only=True)
class RunSection:
    """Where a run writes, and how many processes it starts."""

    name: str = attrs.field(
        default="", validator=check(is_folder_name, "must name a folder within run.dir, in at most 200 bytes")
    )
    """Name of the run; empty: the date and time of its start."""
    dir: str = attrs.field(default="runs", converter=at_home)
    """Folder that holds all runs; this one writes into DIR/NAME."""
    nproc: int = attrs.field(default=0, validator=not_negative)
    """Processes to start on this machine (--nproc for short); 0: only this one. Under torchrun its number counts."""


@attrs.frozen(kw_only=True)
class TrainSection:
    """How long to train, and from which random start."""

    steps: int = attrs.field(default=450, validator=positive)
    """Optimizer steps of the whole run; the learning-rate schedule spans them."""
    stop_after: int = attrs.field(default=0, validator=not_negative)
    """Stop cleanly after this many steps of the run, as a kill would; 0: run to the end."""
    seed: int = attrs.field(default=0, validator=check(lambda v: 0 <= v < 2**62, "must lie in [0, 2^62)"))
    """Decides initial weights, data order and dropout."""
    dtype: str = attrs.field(default="float32", validator=wide)
    """float32 or float64: of weights, gradients and optimizer state when no precision plugin is active."""
    deterministic: bool = False
    """Ask torch for deterministic kernels (slower on GPUs)."""
    max_skipped: int = attrs.field(default=100, validator=not_negative)
    """End the run after this many steps in a row that leave the weights untouched, or 10 at its start; 0: never."""
    timeout: float = attrs.field(default=1800.0, validator=check(lambda v: 0 < v <= 1e7, "must lie in (0, 1e7]"))
    """Seconds that a rank waits for the others, at the start and in a collective, before it gives up."""
    threads: int = attrs.field(default=0, validator=check(lambda v: 0 <= v <= 1024, "must lie in [0, 1024]"))
    """CPU threads of each process; 0: the machine's cores divided by the processes on it."""
    compile: bool = False
    """Compile each layer with torch.compile."""
    peak_tflops: float = attrs.field(default=0.0, validator=not_negative)
    """The device's peak in TFLOP/s, for MFU; 0: known for common GPUs, otherwise only TFLOP/s is shown."""
    bucket_mib: float = attrs.field(default=25.0, validator=positive)
    """MiB of gradients that are summed over ranks at a time, where no sharding plugin sums them."""


@attrs.frozen(kw_only=True)
class ModelSection:
    """The model: a Hugging Face directory, or a small one from these sizes."""

    path: str = attrs.field(default="", converter=at_home)
    """Hugging Face directory with config.json and safetensors; empty: build one from the sizes below."""
    weights: Literal["load", "random"] = "load"
    """With model.path: load its weights, or keep only its shape and start from random ones."""
    family: Literal["llama", "mistral", "qwen2", "qwen3"] = "llama"
    """Architecture when model.path is empty."""
    hidden_size: int = attrs.field(
        default=128,
        validator=positive,
        metadata=fit(lambda width, config: -(-width // (2 * config.model.heads)) * 2 * config.model.heads),
    )
    """Width of the residual stream."""
    intermediate_size: int = attrs.field(default=0, validator=not_negative)
    """Width inside the MLP; 0: 8/3 of hidden_size, rounded up to a multiple of 32."""
    layers: int = attrs.field(default=4, validator=positive)
    """Number of decoder layers."""
    heads: int = attrs.field(
        default=4,
        validator=positive,
        metadata=fit(lambda heads, config: largest_divisor(max(1, config.model.hidden_size // 2), heads)),
    )
    """Number of attention heads."""
    kv_heads: int = attrs.field(
        default=2, validator=positive, metadata=fit(lambda heads, config: largest_divisor(config.model.heads, heads))
    )
    """Number of key/value heads; divides the attention heads."""
    vocab_size: int = attrs.field(default=0, validator=check(lambda v: 0 <= v <= 2**24, "must lie in [0, 2^24]"))
    """Rows of the embedding; 0: the vocabulary of the data's tokenizer."""
    tied: bool = True
    """Share one matrix between the embedding and the head."""
    attention: Literal["sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3"] = "sdpa"
    """transformers' attention implementation; FlashAttention isolates packed documents only with micro_batch = 1."""


@attrs.frozen(kw_only=True)
class DataSection:
    """The data, and the shape of a batch."""

    path: str = attrs.field(default="", converter=at_home)
    """Directory written by `femto preprocess`; empty: the Python standard library's own sources."""
    seq_len: int = attrs.field(default=256, validator=positive)
    """Tokens in a row."""
    micro_batch: int = attrs.field(default=0, validator=not_negative)
    """Rows of one forward pass on one rank; 0: the largest divisor of a rank's share that is at most 8."""
    global_batch: int = attrs.field(default=0, validator=not_negative)
    """Rows of one optimizer step over all ranks and accumulation steps; 0: 16, rounded up to fit the ranks."""
    workers: int = attrs.field(default=0, validator=check(lambda v: 0 <= v <= 256, "must lie in [0, 256]"))
    """Loader processes of each rank; 0: read in the training process. They live as long as the run does."""
    prefetch: int = attrs.field(default=2, validator=positive)
    """Micro-batches that each loader process has ready ahead of the step; no meaning without workers."""
    remainder: Literal["drop", "pad"] = "drop"
    """Last rows of an epoch, where they fill no global batch: leave them out, or pad with rows that carry no loss."""
    shuffle: bool = True
    """A new order in each epoch, decided by train.seed and the epoch."""


@attrs.frozen(kw_only=True)
class OptimSection:
    """AdamW and its learning rate."""

    lr: float = attrs.field(default=6e-3, validator=check(lambda v: 0 < v <= 1e6, "must lie in (0, 1e6]"))
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean of the gradient, and of its square."""
    eps: float = attrs.field(default=1e-8, validator=positive)
    """Added to the denominator."""
    weight_decay: float = attrs.field(default=0.1, validator=not_negative)
    """Decoupled decay, on matrices only: never on norms and biases."""
    clip: float = attrs.field(default=1.0, validator=not_negative)
    """Largest global gradient norm; 0: no clipping."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape of the learning rate after warm-up; wsd: warm-up, stable, decay."""
    warmup: int = attrs.field(
        default=20, validator=not_negative, metadata=fit(lambda steps, config: min(steps, config.train.steps // 10))
    )
    """Steps of linear warm-up, at most a tenth of the run; the first update is at lr / (warmup + 1), never at 0."""
    decay: int = attrs.field(default=0, validator=not_negative)
    """Steps of decay at the end (wsd only); 0: a fifth of the run."""
    min_ratio: float = attrs.field(default=0.1, validator=share)
    """Learning rate at the end, as a share of the peak."""


@attrs.frozen(kw_only=True)
class EvalSection:
    """Loss on held-out rows."""

    every: int = attrs.field(
        default=100,
        validator=not_negative,
        metadata=fit(lambda steps, config: min(steps, max(1, config.train.steps // 4))),
    )
    """Steps between evaluations (one more at the end), by default at least four in a run; 0: none."""
    rows: int = attrs.field(default=64, validator=not_negative)
    """Held-out rows to use; 0: all."""


@attrs.frozen(kw_only=True)
class CheckpointSection:
    """Saving and resuming."""

    every: int = attrs.field(default=0, validator=not_negative)
    """Steps between checkpoints (one more at the end); 0: none."""
    resume: str = attrs.field(default="none", converter=at_home)
    """none; auto: the run's newest complete checkpoint if there is one; or the path of a checkpoint."""
    weights_only: bool = False
    """Take over only the weights of checkpoint.resume; the run begins at its first step, with a new optimizer."""
    keep: int = attrs.field(default=3, validator=not_negative)
    """Newest checkpoints to keep; 0: all."""
    keep_every: int = attrs.field(default=0, validator=not_negative)
    """Keep every checkpoint whose step is a multiple of this; 0: none."""
    wait: bool = False
    """Stop training while a checkpoint is written, instead of copying it first and writing beside training."""
    timeout: float = attrs.field(default=1800.0, validator=positive)
    """Seconds that rank 0 waits for the other ranks' shares of a checkpoint."""

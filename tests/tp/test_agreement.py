"""Every layout trains like one process: losses, norms, gradients and weights, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from femto_tools.testing import RandomTask, Record, WorkerPool, assemble, worst_difference
from tests.tp.tools import Values, merged, tp, train_tp

BOUND = 1e-9
FIVE: Values = {"train": {"steps": 5}, "data": {"micro_batch": 8}}
STAGES: dict[str, Values] = {
    "": {},
    "zero1": {"zero": {"bucket_mib": 0.002}},
    "zero2": {"zero": {"bucket_mib": 0.002}},
    "zero3": {"zero": {"prefetch": 1}},
}
OneProcess = Callable[[Values, RandomTask], Record]


def model(family: str = "llama", tied: bool = True, heads: int = 4, kv_heads: int = 2, **more: Any) -> Values:
    """A model that trains in milliseconds; heads are 4 wide."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "hidden_size": 4 * heads, "vocab_size": 37}
    return {"model": {"family": family, "tied": tied, **sizes, **more}}


def difference(
    pool: WorkerPool,
    one_process: OneProcess,
    values: Values,
    *,
    size: int,
    dp: int = 1,
    sequence_parallel: bool = False,
    plugins: tuple[str, ...] = (),
    micro_batch: int = 0,
    task: RandomTask | None = None,
    more: Values | None = None,
) -> float:
    """Return the largest difference between tp `size` x dp `dp` and one process, with the given settings."""
    task = task or RandomTask()
    cut = merged(
        FIVE, values, {"data": {"micro_batch": micro_batch or 8 // dp}}, tp(size, sequence_parallel), more or {}
    )
    one = one_process(merged(FIVE, values), task)
    many = assemble(pool.run(size * dp, train_tp, cut, plugins, task))
    assert len(one.gradients) == len(many.gradients) == 5
    return worst_difference(one, many)


# Each pair of (layout, ZeRO stage), (ZeRO stage, sequence parallel), (family, layout), (family, tied) occurs
# at least once.
MATRIX = [
    # size, dp, stage, parts of rows, family, tied, documents, micro-batch
    (2, 1, "", False, "llama", True, 1, 8),
    (2, 1, "", True, "mistral", False, 3, 2),
    (2, 1, "zero1", True, "qwen2", True, 3, 4),
    (2, 1, "zero3", False, "qwen3", False, 1, 1),
    (4, 1, "", False, "qwen2", False, 3, 4),
    (4, 1, "", True, "qwen3", True, 1, 8),
    (4, 1, "zero1", False, "mistral", True, 3, 2),
    (4, 1, "zero2", True, "llama", False, 1, 2),
    (4, 1, "zero3", True, "qwen2", True, 3, 8),
    (2, 2, "", False, "qwen3", True, 3, 1),
    (2, 2, "", True, "qwen2", False, 1, 2),
    (2, 2, "zero1", False, "llama", False, 3, 4),
    (2, 2, "zero1", True, "qwen3", True, 1, 1),
    (2, 2, "zero2", False, "qwen2", True, 1, 2),
    (2, 2, "zero2", True, "qwen3", False, 3, 1),
    (2, 2, "zero3", False, "mistral", True, 3, 4),
    (2, 2, "zero3", True, "llama", True, 1, 1),
    (2, 2, "zero3", True, "qwen2", False, 3, 2),
    (1, 2, "zero2", True, "mistral", False, 1, 1),
    (1, 4, "zero3", False, "qwen3", True, 3, 2),
    (1, 1, "", True, "qwen2", True, 3, 4),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("size", "dp", "stage", "sequence_parallel", "family", "tied", "documents", "micro_batch"), MATRIX
)
def test_any_layout_trains_as_one_process(
    pool: WorkerPool,
    one_process: OneProcess,
    size: int,
    dp: int,
    stage: str,
    sequence_parallel: bool,
    family: str,
    tied: bool,
    documents: int,
    micro_batch: int,
) -> None:
    """37 tokens do not divide evenly; with four ranks, two key/value heads are replicated."""
    found = difference(
        pool,
        one_process,
        model(family, tied),
        size=size,
        dp=dp,
        sequence_parallel=sequence_parallel,
        plugins=(stage,) if stage else (),
        micro_batch=micro_batch,
        task=RandomTask(documents=documents),
        more=STAGES[stage],
    )
    assert found < BOUND


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "dp", "sequence_parallel", "family", "stage"),
    [
        (9, 3, 3, 1, False, "llama", ""),
        (9, 3, 3, 1, True, "qwen3", "zero1"),
        (9, 3, 2, 1, False, "qwen2", ""),
        (9, 3, 2, 2, True, "qwen3", "zero3"),
        (9, 3, 2, 2, False, "llama", "zero2"),
        (6, 3, 2, 1, True, "qwen2", ""),
        (4, 4, 4, 1, True, "llama", ""),
        (4, 1, 4, 1, True, "qwen2", ""),
        (4, 1, 2, 2, False, "qwen3", "zero3"),
        (8, 2, 4, 1, False, "qwen3", ""),
        (8, 2, 4, 1, True, "qwen2", "zero2"),
        (5, 5, 4, 1, False, "qwen2", ""),
    ],
    ids=str,
)
def test_even_uneven_and_replicated_heads_train_alike(
    pool: WorkerPool,
    one_process: OneProcess,
    heads: int,
    kv_heads: int,
    size: int,
    dp: int,
    sequence_parallel: bool,
    family: str,
    stage: str,
) -> None:
    """9 heads with 3 key/value heads on 3 ranks and on 2; 2, 1 and 4 key/value heads on 4 ranks; 5 on 4."""
    values = merged(model(family, False, heads, kv_heads), {"data": {"seq_len": 12}})
    found = difference(
        pool,
        one_process,
        values,
        size=size,
        dp=dp,
        sequence_parallel=sequence_parallel,
        plugins=(stage,) if stage else (),
        task=RandomTask(documents=2),
        more=STAGES[stage],
    )
    assert found < BOUND


@pytest.mark.one_in(2)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize(
    "sizes", [{"intermediate_size": 25}, {"intermediate_size": 3}, {"vocab_size": 3}, {"layers": 1}], ids=str
)
def test_sizes_that_do_not_divide_or_are_less_than_ranks(
    pool: WorkerPool, one_process: OneProcess, sizes: dict[str, int], sequence_parallel: bool
) -> None:
    values = model("qwen2", True, **sizes)
    assert difference(pool, one_process, values, size=4, sequence_parallel=sequence_parallel) < BOUND


@pytest.mark.parametrize(
    ("size", "dp", "sequence_parallel", "stage"), [(2, 2, True, ""), (4, 1, False, "zero1"), (2, 2, True, "zero3")]
)
def test_masters_beside_the_weights_train_alike(
    pool: WorkerPool, one_process: OneProcess, size: int, dp: int, sequence_parallel: bool, stage: str
) -> None:
    """Plugin bf16 keeps separate masters, in float64 too."""
    found = difference(
        pool,
        one_process,
        model("qwen3"),
        size=size,
        dp=dp,
        sequence_parallel=sequence_parallel,
        plugins=("bf16", *([stage] if stage else [])),
        micro_batch=2,
        more=STAGES[stage],
    )
    assert found < BOUND


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole rows", "parts of rows"])
def test_eager_attention_sees_its_own_heads(pool: WorkerPool, one_process: OneProcess, sequence_parallel: bool) -> None:
    """transformers' eager attention repeats key/value heads by a count that the module stores."""
    values = model("qwen3", True, 8, 2, attention="eager")
    task = RandomTask(documents=3)
    found = difference(pool, one_process, values, size=4, sequence_parallel=sequence_parallel, task=task)
    assert found < BOUND


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("size", "dp", "sequence_parallel"), [(2, 2, False), (4, 1, True)])
def test_the_same_data_for_fifty_steps_and_the_difference_does_not_grow(
    pool: WorkerPool, one_process: OneProcess, size: int, dp: int, sequence_parallel: bool
) -> None:
    values = merged(model("qwen3", layers=1), {"train": {"steps": 50}, "data": {"shuffle": False, "micro_batch": 8}})
    task = RandomTask(rows=8)
    one = one_process(values, task)
    cut = merged(values, {"data": {"micro_batch": 8 // dp}}, tp(size, sequence_parallel))
    many = assemble(pool.run(size * dp, train_tp, cut, (), task))
    assert one.losses[-1] < one.losses[0] - 1, "a run that learns nothing would prove nothing"
    steps = [
        max(float((mine[name] - theirs[name]).abs().max() / mine[name].abs().max()) for name in mine)
        for mine, theirs in zip(one.gradients, many.gradients, strict=True)
    ]
    assert max(steps) < 1e-10
    assert worst_difference(one, many) < BOUND


def biased(folder: Path) -> Values:
    """A Llama with biases everywhere, as config.json allows: no other family has biases in row layers."""
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=37,
        attention_bias=True,
        mlp_bias=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.save_pretrained(folder)
    return {"model": {"path": str(folder), "weights": "random"}}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("size", "dp", "sequence_parallel", "stage"),
    [(2, 2, False, ""), (4, 1, True, ""), (2, 2, True, "zero1"), (2, 2, True, "zero3"), (4, 1, False, "zero2")],
)
def test_biases_of_row_layers_are_added_once(
    pool: WorkerPool, tmp_path: Path, one_process: OneProcess, size: int, dp: int, sequence_parallel: bool, stage: str
) -> None:
    found = difference(
        pool,
        one_process,
        biased(tmp_path),
        size=size,
        dp=dp,
        sequence_parallel=sequence_parallel,
        plugins=(stage,) if stage else (),
        micro_batch=2,
        more=STAGES[stage],
    )
    assert found < BOUND


def replicated_bits(values: Values, plugins: tuple[str, ...]) -> dict[str, Any]:
    """Train; return the replicated parameters and each rank's gradients of every step."""
    part = train_tp(values, plugins, RandomTask(documents=2))
    names = [name for name, layout in part["layouts"].items() if "layers" in name or "norm" in name]
    return {
        name: (part["layouts"][name].box, part["weights"][name], [g[name] for g in part["gradients"]]) for name in names
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("dtype", "plugins", "sequence_parallel"),
    [("float32", (), False), ("float32", (), True), ("float32", ("bf16",), False), ("float32", ("bf16",), True)],
    ids=["fp32", "fp32, parts of rows", "bf16", "bf16, parts of rows"],
)
def test_replicated_parameters_keep_equal_bits_for_fifty_steps(
    pool: WorkerPool, tmp_path: Path, dtype: str, plugins: tuple[str, ...], sequence_parallel: bool
) -> None:
    """Norms, the biases of row layers and replicas of key/value heads (weights and biases), on four ranks."""
    shared = {"input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"}
    copied = {f"self_attn.{name}_proj.weight" for name in "kv"}
    of_llama = {"self_attn.o_proj.bias", "mlp.down_proj.bias"} | {f"self_attn.{name}_proj.bias" for name in "kv"}
    of_qwen3 = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    family, wanted = (
        (biased(tmp_path), of_llama) if sequence_parallel else (model("qwen3", False, 8, 2, layers=1), of_qwen3)
    )
    assert replicated(pool, family, dtype, plugins, sequence_parallel) == shared | copied | wanted


def replicated(
    pool: WorkerPool, family: Values, dtype: str, plugins: tuple[str, ...], sequence_parallel: bool
) -> set[str]:
    """Compare the replicated parameters; return their names."""
    values = merged(
        family,
        {"train": {"steps": 50, "dtype": dtype}, "data": {"micro_batch": 8}},
        tp(4, sequence_parallel),
    )
    parts = pool.run(4, replicated_bits, values, plugins)
    compared: set[str] = set()
    for rank, part in enumerate(parts):
        for other in parts[:rank]:
            for name, (box, weight, gradients) in part.items():
                other_box, other_weight, other_gradients = other[name]
                if box == other_box:
                    assert torch.equal(weight, other_weight), name
                    assert all(map(torch.equal, gradients, other_gradients)), name
                    compared.add(name.rpartition("layers.0.")[2])
                    assert all(bool(gradient.any()) for gradient in gradients[:1]), name
    return compared

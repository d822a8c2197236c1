"""A packed row computes the same as its conversations one by one: logits, gradients, training, under every layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch

from femto_core.trainer import Trainer
from femto_sft.rows import Row
from femto_tools.testing import Record, WorkerPool, assemble, train_job, worst_difference
from tests.sft import tasks
from tests.sft.making import said, save_tokenizer, write_lines
from tests.sft.tasks import ConversationTask, Values

BOUND = 1e-9
CONVERSATIONS = 12
LAYOUTS: dict[str, tuple[int, tuple[str, ...], Values]] = {
    "one process": (1, (), {}),
    "dp 2": (2, (), {}),
    "tp 2": (2, ("tp",), {"tp": {"size": 2}}),
    "tp 2 with sequence parallelism": (2, ("tp",), {"tp": {"size": 2, "sequence_parallel": True}}),
    "pp 2": (2, ("pp",), {"pp": {"size": 2}}),
    "zero1": (2, ("zero1",), {}),
    "zero2": (2, ("zero2",), {}),
    "zero3": (2, ("zero3",), {}),
    "sac": (1, ("sac",), {}),
    "selective sac": (1, ("sac",), {"sac": {"policy": "selective"}}),
    "tp 2, pp 2 and sac": (4, ("tp", "pp", "sac"), {"tp": {"size": 2}, "pp": {"size": 2}}),
    "dp 2, tp 2 and zero3": (4, ("tp", "zero3"), {"tp": {"size": 2}}),
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    """A dozen conversations of many lengths; a step trains on all of them, however they are packed."""
    folder = tmp_path_factory.mktemp("agreement")
    talks = [
        said(*[turn for n in range(i % 3 + 1) for turn in (("user", f"say {i}{n}"), ("assistant", f"{i}" * (i + 1)))])
        for i in range(CONVERSATIONS)
    ]
    return {
        "model": {"vocab_size": 0},
        "train": {"steps": 3},
        "data": {"seq_len": 256, "global_batch": 12, "micro_batch": 1, "remainder": "pad"},
        "sft": {
            "path": (str(write_lines(folder / "talks.jsonl", *talks)),),
            "tokenizer": save_tokenizer(folder / "tokenizer"),
            "cache": str(folder / "cache"),
            "held_out": 0.0,
            "packing": "ffd",
        },
    }


def changed(values: Values, **sections: dict[str, Any]) -> Values:
    names = {*values, *sections}
    return {name: {**values.get(name, {}), **sections.get(name, {})} for name in names}


def train(pool: WorkerPool, values: Values, ranks: int = 1, plugins: Sequence[str] = ()) -> Record:
    return assemble(pool.run(ranks, train_job, values, tuple(plugins), ConversationTask(), timeout_s=300))


@pytest.fixture(scope="module")
def one_by_one(pool: WorkerPool, values: Values) -> Record:
    """Every conversation in a row of its own, on one process."""
    return train(pool, changed(values, sft={"packing": "pad"}))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_a_packed_row_is_what_transformers_makes_of_each_conversation_alone(
    pool: WorkerPool, values: Values, train_on: str, tied: bool
) -> None:
    settings = changed(values, model={"tied": tied}, sft={"train_on": train_on}, optim={"clip": 0.0})
    [gaps] = pool.run(1, tasks.one_by_one, settings)
    assert gaps.pop("count") > CONVERSATIONS
    assert max(gaps.values()) < BOUND, gaps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_train_as_conversations_in_rows_of_their_own(
    pool: WorkerPool, values: Values, one_by_one: Record, layout: str
) -> None:
    ranks, plugins, settings = LAYOUTS[layout]
    packed = train(pool, changed(values, **settings), ranks, plugins)
    assert worst_difference(one_by_one, packed) < BOUND


def test_best_fit_trains_alike_too(pool: WorkerPool, values: Values, one_by_one: Record) -> None:
    assert worst_difference(one_by_one, train(pool, changed(values, sft={"packing": "bfd"}))) < BOUND


# Documents in a row are isolated.


@pytest.fixture
def trainer(world_of_one: None, values: Values) -> Any:
    made = tasks.start(values)
    yield made
    made.close()


def hidden_of(trainer: Trainer, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Hidden states [s, h] of one row of documents."""
    row = Row(ids, torch.ones(len(ids), dtype=torch.bool), tuple(lengths))
    batch = trainer.collator([row]).to(trainer.mesh.device)
    with torch.no_grad():
        return trainer.stage.forward(batch.input_ids, batch)[0]


@pytest.mark.parametrize("changed_document", [0, 1, 2])
def test_changing_one_document_moves_no_bit_of_another(trainer: Trainer, changed_document: int) -> None:
    lengths = (20, 1, 43)
    ids = torch.randint(300, (64,), generator=torch.Generator().manual_seed(0))
    other, ends = ids.clone(), torch.tensor(lengths).cumsum(0).tolist()
    start = ends[changed_document] - lengths[changed_document]
    other[start : ends[changed_document]] = (other[start : ends[changed_document]] + 7) % 300
    before, after = hidden_of(trainer, ids, lengths), hidden_of(trainer, other, lengths)
    same = torch.ones(64, dtype=torch.bool)
    same[start : ends[changed_document]] = False
    assert torch.equal(before[same], after[same])
    assert not torch.equal(before[~same], after[~same])


def test_a_document_repeated_twenty_times_is_read_each_time_for_the_first_time(trainer: Trainer) -> None:
    ids = torch.randint(300, (12,), generator=torch.Generator().manual_seed(0))
    hidden = hidden_of(trainer, ids.repeat(20), [12] * 20).view(20, 12, -1)
    assert float((hidden - hidden[0]).abs().max()) < 1e-12
    merged = hidden_of(trainer, ids.repeat(20), [240]).view(20, 12, -1)
    assert float((merged[1:] - merged[0]).abs().max()) > 1e-3, "or the test would see nothing"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch loads its compiler
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
def test_the_mask_is_one_for_all_heads_and_lets_no_document_see_another(trainer: Trainer, attention: str) -> None:
    from transformers.masking_utils import create_causal_mask

    config: Any = type(trainer.stage.config).from_dict(trainer.stage.config.to_dict())
    config._attn_implementation = attention
    batch = trainer.collator([trainer.dataset[0]])
    length = batch.input_ids.shape[1]
    embeds = torch.zeros(1, length, config.hidden_size)
    make: Any = create_causal_mask
    mask = make(config, embeds, None, None, position_ids=batch.position_ids)  # without padding mask, without cache
    queries, keys = torch.arange(length)[:, None], torch.arange(length)[None]
    if attention == "sdpa":
        assert mask.shape == (1, 1, length, length)
        seen = mask[0, 0]
    else:
        assert mask.shape[1] == 1
        zero = torch.zeros((), dtype=torch.int64)
        seen = mask.mask_mod(zero, zero, queries, keys)
    numbers = (batch.position_ids[0] == 0).cumsum(0)  # positions restart with each document
    assert torch.equal(seen, (queries >= keys) & (numbers[:, None] == numbers[None]))


# The log of a run, and its evaluation.


def test_a_run_reports_its_rows_and_evaluates_on_the_held_out_share(
    world_of_one: None, values: Values, capsys: pytest.CaptureFixture[str]
) -> None:
    made = tasks.start(changed(values, sft={"held_out": 0.3}))
    out = capsys.readouterr().out
    assert "sft      12 conversations of" in out
    assert "(format messages, recognised by its keys)" in out
    assert len(made.held_out)
    assert 4 < made.evaluate() < 7, "near ln(321) = 5.8, as random weights should be"
    info = made.train_step()
    made.close()
    assert info.loss == info.loss
    assert info.tokens > 0
    assert "WARNING  optim.lr = 0.01 suits training from scratch" in out
    assert attrs.asdict(info)["skipped"] is False

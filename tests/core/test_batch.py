"""A batch: whatever is done to its own tensors is done to the extra ones too."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from femto_core.batch import IGNORE_INDEX, Batch, plain_positions
from femto_core.data import DistributedDataLoader, collate_and_split, evaluation_batches, split_evenly
from femto_core.errors import UserError
from femto_core.mesh import Axis, Mesh
from femto_core.sampler import DistributedSampler
from femto_tools.testing import TINY, RandomTask, WorkerPool, make_trainer, stack_batches

# A loader's processes are forked, and newer Pythons warn about that wherever there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
B, S, K = 5, 6, 3
SHAPES: dict[str, tuple[int, ...]] = {
    "row": (B,),
    "rows": (B, K),
    "token": (B, S),
    "tokens": (B, S, K),
    "deep": (B, S, K, 2),
    "nothing": (B, 0),
}
BY_TOKEN = ("token", "tokens", "deep")


def batch(rows: int = B, length: int = S) -> Batch:
    """A batch in which every number of every tensor is another."""
    ids = torch.arange(rows * length).view(rows, length)
    shapes = {name: (rows, *shape[1:]) for name, shape in SHAPES.items()}
    extra = {name: 1000.0 * n + counted(shape) for n, (name, shape) in enumerate(shapes.items())}
    return Batch(input_ids=ids, targets=ids + 1, position_ids=plain_positions(rows, length), extra=extra)


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)


def tensors(of: Batch) -> dict[str, torch.Tensor]:
    own = {name: getattr(of, name) for name in ("input_ids", "targets", "position_ids")}
    return {**own, **{f"extra {name}": tensor for name, tensor in of.extra.items()}}


def same(one: Batch, other: Batch) -> bool:
    mine, theirs = tensors(one), tensors(other)
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items()
    )


@pytest.mark.parametrize("shape", [(), (0,), (B - 1,), (B + 1, S), (1, B), (S, B)], ids=str)
def test_an_extra_tensor_without_one_entry_a_row_is_refused_by_name_and_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError) as refused:
        attrs.evolve(batch(), extra={"rewards": torch.zeros(shape)})
    assert str(refused.value) == (
        f"Batch.extra['rewards'] has shape {list(shape)}, but its first dimension must be the batch's {B} rows"
    )


def test_map_changes_every_tensor_once_and_leaves_the_batch_alone() -> None:
    before, seen = batch(), []

    def double(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor * 2

    after = before.map(double)
    assert len(seen) == len({id(tensor) for tensor in seen}) == 3 + len(SHAPES)
    assert same(before, batch())
    assert all(torch.equal(tensor, tensors(before)[name] * 2) for name, tensor in tensors(after).items())
    assert {tensor.device.type for tensor in tensors(before.to(torch.device("meta"))).values()} == {"meta"}


def test_a_batch_that_map_would_leave_with_unequal_rows_is_refused() -> None:
    with pytest.raises(UserError, match=r"extra\['rows'\].*the batch's 2 rows"):
        batch().map(lambda tensor: tensor if tensor.dtype == torch.float64 and tensor.shape[1:] == (K,) else tensor[:2])


@pytest.mark.parametrize("rows", [1, 2, 3, B, B + 7])
def test_micro_batches_put_on_top_of_one_another_are_the_batch(rows: int) -> None:
    whole = batch()
    parts = whole.split(rows)
    assert [part.input_ids.shape[0] for part in parts] == [min(rows, B - at) for at in range(0, B, rows)]
    assert all(part.extra.keys() == SHAPES.keys() for part in parts)
    assert same(stack_batches(parts), whole)
    assert sum(part.valid for part in parts) == whole.valid


@pytest.mark.parametrize("places", [[0, 1, 2], [3, 4, 5], [0, 5, 1, 4], [2], [], [5, 4, 3, 2, 1, 0]], ids=str)
def test_tokens_are_taken_in_the_order_asked_for_wherever_there_is_one_value_a_token(places: list[int]) -> None:
    whole = batch()
    part = whole.tokens(torch.tensor(places, dtype=torch.int64))
    for name, tensor in tensors(part).items():
        before = tensors(whole)[name]
        by_token = not name.startswith("extra ") or name.removeprefix("extra ") in BY_TOKEN
        assert torch.equal(tensor, before[:, places] if by_token else before), name


def test_cutting_rows_and_cutting_tokens_may_come_in_either_order() -> None:
    places = torch.tensor([4, 0, 3])
    first = [part.tokens(places) for part in batch().split(2)]
    second = batch().tokens(places).split(2)
    assert len(first) == len(second) == 3
    assert all(same(one, other) for one, other in zip(first, second, strict=True))


def test_a_batch_survives_pickling_extra_tensors_included() -> None:
    for one in (batch(), Batch(input_ids=torch.ones(1, 1), targets=torch.ones(1, 1), position_ids=torch.ones(1, 1))):
        again = pickle.loads(pickle.dumps(one))
        assert isinstance(again, Batch)
        assert same(one, again)


# Through the loader.


@attrs.frozen
class Pairs:
    """Sample i is two rows of numbers from 10 * i on: a collator makes two rows of each."""

    count: int = 8
    vocab_size: int = 1000
    tokenizer_path: Path = Path("none")
    fingerprint: str = "pairs"

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


def collate_pairs(samples: Sequence[int]) -> Batch:
    rows = torch.tensor([10 * sample + side for sample in samples for side in (0, 1)])
    ids = rows[:, None] + torch.arange(4)
    extra = {"row": rows.double(), "token": ids.double()}
    return Batch(input_ids=ids, targets=ids, position_ids=plain_positions(len(rows), 4), extra=extra)


@pytest.mark.parametrize("workers", [0, 2])
def test_extra_tensors_come_through_the_loader_and_padding_has_no_target_in_either_row_of_a_pair(workers: int) -> None:
    sampler = DistributedSampler(
        rows=5, global_batch=4, micro_batch=2, size=1, rank=0, seed=0, shuffle=False, remainder="pad"
    )
    loader = DistributedDataLoader(Pairs(5), sampler, collate_pairs, workers=workers, pin_memory=False)
    steps = [loader.next_step() for _ in range(2)]
    loader.close()
    assert [len(step) for step in steps] == [2, 2]
    assert [batch.extra["row"].tolist() for batch in steps[0]] == [[0, 1, 10, 11], [20, 21, 30, 31]]
    last, padding = steps[1]
    assert (last.targets != IGNORE_INDEX).all(dim=1).tolist() == [True, True, False, False]
    assert (last.targets != IGNORE_INDEX).any(dim=1).tolist() == [True, True, False, False]
    assert padding.valid == 0
    assert torch.equal(last.extra["token"], last.input_ids.double())


def test_evaluation_pads_pairs_too() -> None:
    batches = list(evaluation_batches(Pairs(), collate_pairs, rows=3, micro_batch=2, size=1, rank=0))
    assert [batch.valid for batch in batches] == [16, 8]


# Parts of rows.


def parts_of_rows(seq_len: int) -> tuple[list[int], Batch, str]:
    mesh = Mesh([Axis("cp", 2, 60, "tokens"), Axis("more", 2, 70, "tokens")], torch.device("cpu"))
    config: Any = attrs.make_class("C", ["data"])(attrs.make_class("D", ["seq_len"])(seq_len))
    try:
        split = split_evenly(config, mesh)
    except UserError as error:
        return [], batch(), str(error)
    part = collate_and_split(lambda samples: batch(length=seq_len), pickle.loads(pickle.dumps(split)), [])
    return part.input_ids[0].tolist(), part, ""


def test_the_default_split_gives_ranks_consecutive_equal_parts_in_the_order_of_their_coordinates(
    pool: WorkerPool,
) -> None:
    answers = pool.run(4, parts_of_rows, 8)
    assert [ids for ids, _, _ in answers] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for rank, (_, part, _) in enumerate(answers):
        assert part.position_ids[0].tolist() == [2 * rank, 2 * rank + 1]
        assert part.extra["row"].shape == (B,)


def test_rows_that_do_not_divide_into_equal_parts_are_refused_in_one_sentence(pool: WorkerPool) -> None:
    for _, _, said in pool.run(4, parts_of_rows, 10):
        assert said == (
            "data.seq_len = 10 does not divide into 4 equal parts (mesh axis cp, more); set "
            "--data.seq-len to a multiple"
        )


def whole_rows() -> bool:
    trainer = make_trainer({}, (), {"task": RandomTask()})
    [first, *_] = trainer.loader.next_step()
    trainer.close()
    return first.input_ids.shape == (1, TINY["data"]["seq_len"])


def test_rows_stay_whole_where_no_axis_splits_tokens(pool: WorkerPool) -> None:
    assert pool.run(2, whole_rows) == [True, True]

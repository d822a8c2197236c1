"""Column layers with the same input share one sum of its gradient; a layer's communication is that of the papers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from femto_ops.deferral import WeightGradients
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from femto_tp.column import gather_for
from femto_tp.sequence import SequenceShards
from tests.tp.tools import (
    Values,
    all_ranks,
    close,
    columns,
    counted,
    leaf,
    merged,
    normal,
    places,
    tp,
)

FULL = {"q": (normal(1, 8, 6), normal(2, 8)), "k": (normal(3, 4, 6), None), "v": (normal(4, 4, 6), normal(5, 4))}
GRADS = {name: normal(6 + n, 2, 8, len(weight)) for n, (name, (weight, _)) in enumerate(FULL.items())}


def group_job(calls: tuple[tuple[str, str], ...], is_sequence_parallel: bool) -> int:
    """Call members (name, input) in the given order; compare with plain layers; return the collectives in backward.

    Inputs: "x" is the shared tensor; "other" is a tensor computed from it.
    """
    ranks, weight_grads = all_ranks(), WeightGradients()
    x = normal(9, 2, 8, 6)
    ref = {name: (leaf(w), None if b is None else leaf(b)) for name, (w, b) in FULL.items()}
    ref_x = leaf(x)
    inputs = {"x": ref_x, "other": ref_x.tanh()}
    wanted = [F.linear(inputs[which], *ref[name]) for name, which in calls]
    torch.autograd.backward(wanted, [GRADS[name] for name, _ in calls])

    layers, group = columns(FULL, ranks, weight_grads, in_sequence=is_sequence_parallel)
    part = x.chunk(ranks.size, 1)[ranks.rank] if is_sequence_parallel else x
    ours = leaf(part)
    whole = gather_for([group], SequenceShards(ranks), ours) if is_sequence_parallel else ours
    inputs = {"x": whole, "other": whole.tanh()}
    found = [layers[name](inputs[which]) for name, which in calls]
    cut = {name: places(len(weight), ranks) for name, (weight, _) in FULL.items()}
    with counted() as seen:
        torch.autograd.backward(found, [GRADS[name][..., cut[name]] for name, _ in calls])
    for y, expected, (name, _) in zip(found, wanted, calls, strict=True):
        close(y, expected[..., cut[name]], name)
    expected_x = ref_x.grad
    assert expected_x is not None
    close(ours.grad, expected_x.chunk(ranks.size, 1)[ranks.rank] if is_sequence_parallel else expected_x, "input")
    called = {name for name, _ in calls}
    for name, layer in layers.items():
        if name not in called:
            assert layer.weight.grad is None or not layer.weight.grad.any(), name
            continue
        weight, bias = ref[name]
        assert weight.grad is not None
        close(layer.weight.grad, weight.grad[cut[name]], f"{name}.weight")
        if bias is not None:
            assert bias.grad is not None
            assert layer.bias is not None
            close(layer.bias.grad, bias.grad[cut[name]], f"{name}.bias")
    return sum(kind in ("all_reduce", "reduce_scatter") for kind, _ in seen)


X = ("q", "x"), ("k", "x"), ("v", "x")


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize(
    ("calls", "sums"),
    [
        (X, 1),
        (X[::-1], 1),
        (X[:2], 1),
        (X[2:], 1),
        ((*X, *X), 2),
        ((X[0], X[0], X[1], X[2]), 2),
        ((X[0], ("k", "other"), X[2]), 3),
        ((("q", "other"), ("k", "other"), ("v", "other")), 1),
        ((X[0], X[1], ("v", "other")), 2),
    ],
    ids=["all", "in reverse", "one never", "one alone", "twice", "one twice", "one in between", "other", "one other"],
)
def test_members_called_in_any_way_give_the_gradients_of_plain_layers(
    pool: WorkerPool, calls: tuple[tuple[str, str], ...], sums: int, is_sequence_parallel: bool
) -> None:
    for world in (2, 4):
        for number in pool.run(world, group_job, calls, is_sequence_parallel):
            if is_sequence_parallel:  # a call with another tensor may add one sum
                assert number <= sums
            else:
                assert number == sums


def leave_nothing_behind() -> None:
    ranks, weight_grads = all_ranks(), WeightGradients()
    layers, group = columns(FULL, ranks, weight_grads)
    x = normal(9, 2, 6)
    for member in ("q", "k", "v", "k", "v", "q"):
        layers[member](x)
    assert not group._outputs
    assert group._input is None, "the group keeps a tensor alive"


def test_a_group_keeps_nothing_once_all_members_were_called(pool: WorkerPool) -> None:
    pool.run(1, leave_nothing_behind)


def change_in_place() -> bool:
    """Without gradients no other check would notice; with gradients autograd refuses the first member's backward."""
    ranks, weight_grads = all_ranks(), WeightGradients()
    layers, _ = columns(FULL, ranks, weight_grads)
    cut = places(4, ranks)
    x = normal(9, 2, 6)
    with torch.no_grad():
        layers["q"](x)
        x.add_(1)
        return torch.allclose(layers["k"](x), F.linear(x, FULL["k"][0])[..., cut])


def test_an_input_that_was_changed_in_place_is_a_new_input(pool: WorkerPool) -> None:
    assert all(pool.run(2, change_in_place))


# Communication.


SIZES: Values = {
    "model": {"hidden_size": 16, "intermediate_size": 24, "heads": 4, "kv_heads": 4, "vocab_size": 32, "layers": 3},
    "data": {"micro_batch": 2, "global_batch": 2, "seq_len": 8},
}
B, S, H = 2, 8, 16


def one_step(values: Values) -> list[list[tuple[str, int]]]:
    """Return the collectives of the middle one of three layers: in one forward, and in one backward.

    Counting starts when the layer is entered, and ends when it is left.
    """
    trainer = make_trainer(values, ("tp",), {"random_task": RandomTask(masked=0.0)})
    layers = dict(trainer.stage.named_layers())
    marks: list[int] = []
    middle = layers["model.layers.1"]
    with counted() as seen:
        # the hook of a gradient [b, s, h] runs when the layer above has computed it
        def mark(*_: Any) -> None:
            marks.append(len(seen))

        def after(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            mark()
            output.register_hook(mark)  # type: ignore[no-untyped-call]

        def before(_module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            mark()
            inputs[0].register_hook(mark)  # type: ignore[no-untyped-call]

        middle.register_forward_pre_hook(before)
        middle.register_forward_hook(after)
        [batch] = trainer.loader.next_step()
        hidden = trainer.stage.forward(batch.input_ids, batch)
        trainer.loss(hidden, trainer.stage.head, batch).backward()  # type: ignore[no-untyped-call]
    trainer.close()
    begin, end, begin_back, end_back = marks
    return [seen[begin:end], seen[begin_back:end_back]]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_a_layer_sends_what_the_textbook_says(pool: WorkerPool, size: int, kv_heads: int) -> None:
    """Two all-reduces of [b, s, h] in forward, two in backward, and sums of replicated key/value heads' gradients."""
    values = merged(SIZES, tp(size), {"model": {"kv_heads": kv_heads}})
    for forward, backward in pool.run(size, one_step, values):
        assert forward == [("all_reduce", B * S * H)] * 2
        replicas = [("all_reduce", H // 4 * H)] * 2 if size > kv_heads else []
        assert Counter(backward) == Counter([("all_reduce", B * S * H)] * 2 + replicas)


@pytest.mark.parametrize("size", [2, 4])
def test_sequence_parallelism_sends_the_same_and_gathers_layers_inputs_again(pool: WorkerPool, size: int) -> None:
    """An all-reduce equals a reduce-scatter and an all-gather: 4 such pairs per layer, with and without.

    In addition, column layers save a part of their input and gather it again for their weights' gradients: 2 more
    all-gathers (Korthikanti et al. 2022, section 4.2.2).
    """
    whole = B * S * H
    for forward, backward in pool.run(size, one_step, merged(SIZES, tp(size, True))):
        assert Counter(forward) == {("all_gather", whole): 2, ("reduce_scatter", whole): 2}
        assert Counter(backward) == {("all_gather", whole): 2 + 2, ("reduce_scatter", whole): 2}
        plain = 4 * 2  # 4 all-reduces, each with the bytes of 2 other collectives
        again = sum(kind == "all_gather" for kind, _ in backward) - 2
        assert len(forward) + len(backward) - again == plain


def saved_bytes(values: Values) -> int:
    """Return the bytes that the middle layer saves for backward, without parameters."""
    trainer = make_trainer(values, ("tp",), {"random_task": RandomTask()})
    own = {p.untyped_storage()._cdata for _, p in trainer.stage.named_parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes()
        return tensor

    [batch] = trainer.loader.next_step()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = trainer.stage.forward(batch.input_ids, batch)
    del hidden
    trainer.close()
    return sum(found.values())


def test_sequence_parallelism_saves_memory(pool: WorkerPool) -> None:
    """Long rows and narrow MLPs, so that activations between the matrices dominate."""
    long = merged(SIZES, {"data": {"seq_len": 64}, "model": {"layers": 4}})
    plain, parts = (max(pool.run(4, saved_bytes, merged(long, tp(4, sp)))) for sp in (False, True))
    assert parts < 0.6 * plain

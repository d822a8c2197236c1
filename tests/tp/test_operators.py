"""The operators and layers against the same computation in one process, in float64: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from femto_ops.deferral import WeightGradients
from femto_tools.testing import WorkerPool
from femto_tp.column import ColumnParallelLinear, gather_for
from femto_tp.cuts import even
from femto_tp.embedding import VocabParallelEmbedding
from femto_tp.head import VocabParallelHead
from femto_tp.ranks import Ranks
from femto_tp.regions import (
    copy_to_tp_region,
    gather_from_tp_region,
    reduce_from_tp_region,
    scatter_to_tp_region,
)
from femto_tp.row import RowParallelLinear
from femto_tp.sequence import SEQUENCE, SequenceShards
from tests.tp.tools import all_ranks, close, columns, leaf, normal, parameter, places, row

WORLDS = (2, 3, 4)


# The four operators.


def operators(dim: int, strided: bool) -> None:
    """Each operator and its gradient against the table in `regions`; `strided`: no tensor is contiguous."""
    ranks = all_ranks()
    shape = [3, 5, 7]
    shape[dim] = 2 * ranks.size

    def made(seed: int, *sizes: int) -> torch.Tensor:
        return normal(seed, *sizes[::-1]).permute(2, 1, 0) if strided else normal(seed, *sizes)

    alike, mine = made(1, *shape), made(2 + ranks.rank, *shape)
    everyone = [made(2 + rank, *shape) for rank in range(ranks.size)]
    assert alike.is_contiguous() is not strided
    longer = [size * ranks.size if d == dim % 3 else size for d, size in enumerate(shape)]

    x = leaf(alike)
    y = copy_to_tp_region(x, ranks)
    y.backward(mine)  # type: ignore[no-untyped-call]
    close(y, alike, "copy")
    close(x.grad, torch.stack(everyone).sum(0), "copy's gradient")

    x = leaf(mine)
    y = reduce_from_tp_region(x, ranks)
    y.backward(alike)  # type: ignore[no-untyped-call]
    close(y, torch.stack(everyone).sum(0), "reduce")
    close(x, mine, "reduce's input is left alone")
    close(x.grad, alike, "reduce's gradient")

    x, grad = leaf(mine), made(9, *longer)
    y = gather_from_tp_region(x, ranks, dim)
    y.backward(grad)  # type: ignore[no-untyped-call]
    close(y, torch.cat(everyone, dim), "gather")
    close(x.grad, grad.chunk(ranks.size, dim)[ranks.rank], "gather's gradient")

    x = leaf(alike)
    y = scatter_to_tp_region(x, ranks, dim)
    grads = [grad.chunk(ranks.size, dim)[0] for grad in everyone]
    y.backward(grads[ranks.rank])  # type: ignore[no-untyped-call]
    close(y, alike.chunk(ranks.size, dim)[ranks.rank], "scatter")
    close(x.grad, torch.cat(grads, dim), "scatter's gradient")


@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_operators_are_what_their_table_says(pool: WorkerPool, dim: int, strided: bool) -> None:
    for world in (2, 4):
        pool.run(world, operators, dim, strided)


def operators_pass_gradcheck() -> None:
    """Run gradcheck on regions whose input is the same on all ranks, so that all ranks perturb it together."""
    ranks = all_ranks()
    x = leaf(normal(1, 3, 2 * ranks.size))
    factor = normal(5 + ranks.rank, 2 * ranks.size)

    def shoeybi(x: torch.Tensor) -> torch.Tensor:
        return reduce_from_tp_region((copy_to_tp_region(x, ranks) * factor).tanh(), ranks)

    def parts(x: torch.Tensor) -> torch.Tensor:
        return gather_from_tp_region(scatter_to_tp_region(x, ranks).sin() * (1 + ranks.rank), ranks)

    def sequence(x: torch.Tensor) -> torch.Tensor:
        part = scatter_to_tp_region(x.unsqueeze(0), ranks, 1).exp()
        whole = gather_from_tp_region(part, ranks, SEQUENCE, partial=True)
        partial = (whole * factor).tanh()
        part = scatter_to_tp_region(reduce_from_tp_region(partial, ranks), ranks, 1)
        return gather_from_tp_region(part, ranks, SEQUENCE)

    for function, argument in ((shoeybi, x), (parts, x), (sequence, leaf(normal(1, 2 * ranks.size, 2 * ranks.size)))):
        assert torch.autograd.gradcheck(function, (argument,))


@pytest.mark.parametrize("world", [2, 4])
def test_regions_pass_gradcheck(pool: WorkerPool, world: int) -> None:
    pool.run(world, operators_pass_gradcheck)


def scatter_refuses() -> str:
    with pytest.raises(ValueError, match="does not divide") as caught:
        scatter_to_tp_region(torch.ones(2, 5), all_ranks())
    return str(caught.value)


def test_a_dimension_of_five_on_four_ranks_is_not_padded_to_eight(pool: WorkerPool) -> None:
    assert pool.run(4, scatter_refuses) == ["a dimension of 5 does not divide into 4 equal parts"] * 4


def test_uneven_ranges_cover_every_index_once() -> None:
    assert even(5, 4) == [range(2), range(2, 3), range(3, 4), range(4, 5)]
    assert [len(part) for part in even(2, 4)] == [1, 1, 0, 0]
    for total in range(12):
        for size in range(1, 6):
            assert [place for part in even(total, size) for place in part] == list(range(total))
            assert max(map(len, even(total, size))) - min(map(len, even(total, size))) <= 1


# Column and row layers, alone and combined in an MLP.


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return the same values with another memory order."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def column_equals_linear(d_in: int, d_out: int, bias: bool, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ranks, weight_grads = all_ranks(), WeightGradients()
    weight, b = normal(1, d_out, d_in), normal(2, d_out) if bias else None
    x, grad = change(normal(3, 2, 5, d_in)), change(normal(4, 2, 5, d_out))
    full_x, full_w, full_b = leaf(x), leaf(weight), None if b is None else leaf(b)
    F.linear(full_x, full_w, full_b).backward(grad)  # type: ignore[no-untyped-call]

    layers, _ = columns({"only": (weight, b)}, ranks, weight_grads)
    layer, mine = layers["only"], places(d_out, ranks)
    ours = leaf(x)
    y = layer(ours)
    y.backward(grad[..., mine])
    close(y, F.linear(x, weight, b)[..., mine], "output")
    close(ours.grad, full_x.grad, "input")
    assert full_w.grad is not None
    close(layer.weight.grad, full_w.grad[mine], "weight")
    if bias:
        assert full_b is not None
        assert full_b.grad is not None
        assert layer.bias is not None
        close(layer.bias.grad, full_b.grad[mine], "bias")
    loose = layer(leaf(x))
    loose.sum().backward()  # a gradient of stride 0
    close(layer.weight.grad, full_w.grad[mine] + x.flatten(0, -2).sum(0).expand(len(layer.weight), -1), "expanded")


def row_equals_linear(d_in: int, d_out: int, bias: bool, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ranks, weight_grads = all_ranks(), WeightGradients()
    weight, b = normal(1, d_out, d_in), normal(2, d_out) if bias else None
    x, grad = change(normal(3, 2, 5, d_in)), change(normal(4, 2, 5, d_out))
    full_x, full_w, full_b = leaf(x), leaf(weight), None if b is None else leaf(b)
    F.linear(full_x, full_w, full_b).backward(grad)  # type: ignore[no-untyped-call]

    layer, mine = row(weight, b, ranks, weight_grads), places(d_in, ranks)
    ours = leaf(x[..., mine])
    y = layer(ours)
    y.backward(grad)
    close(y, F.linear(x, weight, b), "output: the bias is added once")
    assert full_x.grad is not None
    assert full_w.grad is not None
    close(ours.grad, full_x.grad[..., mine], "input")
    close(layer.weight.grad, full_w.grad[:, mine], "weight")
    if bias:
        assert full_b is not None
        assert layer.bias is not None
        close(layer.bias.grad, full_b.grad, "bias")
    assert layer.weight.grad is not None
    before = layer.weight.grad.clone()
    layer(leaf(x[..., mine])).sum().backward()
    close(layer.weight.grad - before, x[..., mine].flatten(0, -2).sum(0).expand(d_out, -1), "expanded")


@pytest.mark.parametrize("job", [column_equals_linear, row_equals_linear])
@pytest.mark.parametrize("change", [torch.Tensor.contiguous, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("d_in", "d_out", "bias"), [(6, 8, True), (5, 5, True), (5, 7, False), (3, 3, True)], ids=str)
def test_layers_equal_the_unsplit_layer(
    pool: WorkerPool, job: Callable[..., None], change: Any, d_in: int, d_out: int, bias: bool
) -> None:
    """5 rows on 4 ranks, and 3 on 4 (one rank has none): without padding or loss."""
    for world in WORLDS:
        pool.run(world, job, d_in, d_out, bias, change)


def frozen_parts() -> None:
    """A frozen weight gets no gradient, other weights keep theirs; an input without gradient costs no all-reduce."""
    ranks, weight_grads = all_ranks(), WeightGradients()
    layers, _ = columns({"a": (normal(1, 4, 3), normal(2, 4)), "b": (normal(3, 6, 3), None)}, ranks, weight_grads)
    layers["a"].weight.requires_grad_(False)
    down = row(normal(5, 3, 4), None, ranks, weight_grads)
    down.weight.requires_grad_(False)
    x = leaf(normal(4, 2, 3))
    (down(layers["a"](x)).sum() + layers["b"](x).sum()).backward()
    assert layers["a"].weight.grad is None
    assert down.weight.grad is None
    full = leaf(normal(4, 2, 3))
    y = F.linear(F.linear(full, normal(1, 4, 3), normal(2, 4)), normal(5, 3, 4)).sum()
    # each rank has its own loss inside the region; x receives the sum over ranks
    (y + F.linear(full, normal(3, 6, 3)).sum()).backward()  # type: ignore[no-untyped-call]
    close(x.grad, full.grad)
    close(layers["b"].weight.grad, normal(4, 2, 3).sum(0).expand(len(layers["b"].weight), -1))
    assert layers["a"].bias is not None
    assert layers["a"].bias.grad is not None
    data = normal(4, 2, 3)
    layers["a"](data).sum().backward()
    assert data.grad is None


@pytest.mark.parametrize("world", [2, 4])
def test_frozen_weights_and_inputs_without_gradient(pool: WorkerPool, world: int) -> None:
    pool.run(world, frozen_parts)


def mlp(is_sequence_parallel: bool, h: int, i: int) -> None:
    """down(silu(gate(x)) * up(x)), with or without sequence parallelism, against one process; all gradients."""
    ranks, weight_grads = all_ranks(), WeightGradients()
    s = 2 * ranks.size
    x, grad = normal(1, 3, s, h), normal(2, 3, s, h)
    full = {name: (normal(10 + n, i, h), normal(20 + n, i)) for n, name in enumerate(("gate", "up"))}
    w, b = normal(30, h, i), normal(31, h)
    ref = {name: (leaf(weight), leaf(bias)) for name, (weight, bias) in full.items()}
    ref_x, ref_w, ref_b = leaf(x), leaf(w), leaf(b)
    gated = F.silu(F.linear(ref_x, *ref["gate"])) * F.linear(ref_x, *ref["up"])
    wanted = F.linear(gated, ref_w, ref_b)
    wanted.backward(grad)  # type: ignore[no-untyped-call]

    rows = SequenceShards(ranks) if is_sequence_parallel else None
    layers, group = columns(full, ranks, weight_grads, in_sequence=is_sequence_parallel)
    down = row(w, b, ranks, weight_grads, rows)
    part = (lambda t: t.chunk(ranks.size, 1)[ranks.rank]) if is_sequence_parallel else (lambda t: t)
    ours = leaf(part(x))  # type: ignore[no-untyped-call]
    whole = ours if rows is None else gather_for([group], rows, ours)
    y = down(F.silu(layers["gate"](whole)) * layers["up"](whole))
    y.backward(part(grad))  # type: ignore[no-untyped-call]
    close(y, part(wanted), "output")  # type: ignore[no-untyped-call]
    close(ours.grad, part(ref_x.grad), "input")  # type: ignore[no-untyped-call]
    mine = places(i, ranks)
    for name, layer in layers.items():
        for key, value in (("weight", layer.weight), ("bias", layer.bias)):
            assert value is not None
            expected = ref[name][key == "bias"].grad
            assert expected is not None
            close(value.grad, expected[mine], f"{name}.{key}")
    assert ref_w.grad is not None
    close(down.weight.grad, ref_w.grad[:, mine], "down.weight")
    assert down.bias is not None
    assert down.bias.grad is not None
    bias_grad = ranks.sum(down.bias.grad.clone()) if is_sequence_parallel else down.bias.grad
    close(bias_grad, ref_b.grad, "down.bias")


@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["whole rows", "parts of rows"])
@pytest.mark.parametrize(("h", "i"), [(6, 8), (5, 5), (4, 3)])
def test_an_mlp_equals_one_process(pool: WorkerPool, is_sequence_parallel: bool, h: int, i: int) -> None:
    for world in WORLDS:
        pool.run(world, mlp, is_sequence_parallel, h, i)


def layers_pass_gradcheck() -> None:
    ranks, weight_grads = all_ranks(), WeightGradients()
    full = {"a": (normal(1, 6, 3), normal(2, 6)), "b": (normal(3, 6, 3), None)}
    layers, _ = columns(full, ranks, weight_grads)
    in_parts, group = columns(full, ranks, weight_grads, in_sequence=True)
    down, rows = row(normal(4, 3, 6), normal(5, 3), ranks, weight_grads), SequenceShards(ranks)
    down_sp = RowParallelLinear(down.weight, down.bias, ranks, weight_grads, rows)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return down(layers["a"](x).tanh() * layers["b"](x))  # type: ignore[no-any-return]

    def parts(x: torch.Tensor) -> torch.Tensor:
        x = gather_for([group], rows, rows.scatter(x))
        return rows.gather(down_sp(in_parts["a"](x).tanh() * in_parts["b"](x)), partial=False)

    for function in (whole, parts):
        assert torch.autograd.gradcheck(function, (leaf(normal(6, 2, ranks.size, 3)),))


def test_layers_pass_gradcheck(pool: WorkerPool) -> None:
    pool.run(2, layers_pass_gradcheck)


# Embedding and head.


def embedding_and_head(vocab: int, padding: int | None) -> None:
    """Tied embedding and head: the shared weight's gradient is the sum of both; each id is looked up on one rank."""
    ranks = all_ranks()
    weight = normal(1, vocab, 3)
    ids = torch.arange(2 * vocab + 1).remainder(vocab).view(1, -1)
    grad = normal(3, 1, ids.numel(), vocab)
    ref = leaf(weight)
    hidden = F.embedding(ids, ref, padding)
    hidden.retain_grad()
    wanted = F.linear(hidden.tanh(), ref)
    wanted.backward(grad)  # type: ignore[no-untyped-call]

    mine = places(vocab, ranks)
    held = parameter(weight[mine])
    embedding = VocabParallelEmbedding(held, mine.start, padding, ranks)
    head = VocabParallelHead(held, mine.start, vocab, ranks, sums_input_grad=True)
    found = embedding(ids)
    found.retain_grad()
    logits = head(found.tanh())
    logits.backward(grad)
    close(found, hidden, "rows")
    close(logits, wanted, "logits")
    close(found.grad, hidden.grad, "hidden")
    assert ref.grad is not None
    close(held.grad, ref.grad[mine], "weight")
    alone = parameter(weight[mine])
    VocabParallelEmbedding(alone, mine.start, padding, ranks)(ids).sum().backward()
    if padding is not None and mine.start <= padding < mine.stop:
        assert alone.grad is not None
        assert not alone.grad[padding - mine.start].any(), "padding gets no gradient"


@pytest.mark.parametrize("padding", [None, 0, 2])
@pytest.mark.parametrize("vocab", [37, 8, 3])
def test_embedding_and_head_equal_the_unsplit_ones(pool: WorkerPool, vocab: int, padding: int | None) -> None:
    """37 rows do not divide by 2 or 4; 3 rows are fewer than 4 ranks."""
    for world in (2, 4):
        pool.run(world, embedding_and_head, vocab, padding)


def test_bf16_layers_round_like_the_unsplit_layer(pool: WorkerPool) -> None:
    pool.run(2, bf16_layers)


def bf16_layers() -> None:
    """Partial sums are rounded to bf16 before they are added; results differ by a few bf16 roundings."""
    ranks, weight_grads, bf16 = all_ranks(), WeightGradients(), torch.bfloat16
    x, w, v = normal(1, 4, 32, dtype=bf16), normal(2, 64, 32, dtype=bf16), normal(3, 32, 64, dtype=bf16)
    layers, _ = columns({"only": (w, None)}, ranks, weight_grads)
    down, ours = row(v, None, ranks, weight_grads), leaf(x)
    y = down(layers["only"](ours))
    y.float().square().sum().backward()
    ref_x, ref_w, ref_v = leaf(x.double()), leaf(w.double()), leaf(v.double())
    wanted = F.linear(F.linear(ref_x, ref_w), ref_v)
    wanted.square().sum().backward()  # type: ignore[no-untyped-call]
    mine = places(64, ranks)
    assert ref_w.grad is not None
    assert ref_v.grad is not None
    pairs = [
        (y, wanted),
        (ours.grad, ref_x.grad),
        (layers["only"].weight.grad, ref_w.grad[mine]),
        (down.weight.grad, ref_v.grad[:, mine]),
    ]
    for found, expected in pairs:
        assert found is not None
        assert expected is not None
        assert found.dtype == bf16
        assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()


def replicas(kind: type[Ranks]) -> None:
    """Ranks with the same key/value shard: gradients of weight and bias are sums over ranks, with equal bits."""
    ranks, weight_grads = kind(all_ranks().group), WeightGradients()
    weight, bias = normal(1, 3, 5), normal(2, 3)
    group = columns({}, ranks, weight_grads)[1]
    layer = ColumnParallelLinear(parameter(weight), parameter(bias), group, ranks)
    x, grads = normal(3, 2, 4, 5), [normal(4 + rank, 2, 4, 3) for rank in range(ranks.size)]
    ours = leaf(x)
    layer(ours).backward(grads[ranks.rank])
    ref_x, ref_w, ref_b = leaf(x), leaf(weight), leaf(bias)
    F.linear(ref_x, ref_w, ref_b).backward(torch.stack(grads).sum(0))  # type: ignore[no-untyped-call]
    close(ours.grad, ref_x.grad)
    close(layer.weight.grad, ref_w.grad)
    assert layer.bias is not None
    close(layer.bias.grad, ref_b.grad)
    assert layer.weight.grad is not None
    everyone = ranks.gather(layer.weight.grad, 0).chunk(ranks.size)
    assert all(torch.equal(other, everyone[0]) for other in everyone)


@pytest.mark.parametrize("world", [2, 3])
def test_replicas_of_a_key_value_head_sum_their_gradients(pool: WorkerPool, world: int) -> None:
    pool.run(world, replicas, Ranks)

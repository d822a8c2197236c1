"""AdamW's groups, the learning-rate schedules, and one global norm from many ranks' parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
import torch
from torch import nn

from femto_core.grad_norm import clip_grads, grad_norm_squared
from femto_core.hookspecs import hookimpl
from femto_core.layout import ParamLayout
from femto_core.mesh import Axis, Mesh
from femto_core.model import FullModel
from femto_core.optim import make_adamw, make_lr_schedule, scale_lr
from femto_core.precision import ParamShare
from femto_core.sections import OptimSection
from femto_tools.testing import RandomTask, WorkerPool, make_trainer

CPU = torch.device("cpu")
ScheduleName = Literal["cosine", "linear", "constant", "wsd"]
SCHEDULES: tuple[ScheduleName, ...] = ("cosine", "linear", "constant", "wsd")


def share(
    values: Sequence[float], name: str = "w", replicated: Sequence[str] = ("dp",), shape: tuple[int, ...] | None = None
) -> ParamShare:
    """A parameter whose gradient has `values`; its global shape is `shape`, where it is a flat share of a matrix."""
    parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.float64))
    parameter.grad = torch.tensor(values, dtype=torch.float64)
    layout = ParamLayout.whole(name, shape or (len(values),), replicated)
    return ParamShare(name=name, compute=parameter, master=parameter, layout=layout)


# Weight decay.


def decays(family: str) -> dict[str, float]:
    trainer = make_trainer({"model": {"family": family, "tied": False}, "optim": {"weight_decay": 0.25}})
    names = {id(g.master): g.name for g in trainer.shares}
    found = {names[id(p)]: part["weight_decay"] for part in trainer.optimizer.param_groups for p in part["params"]}
    trainer.close()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_decay_falls_on_matrices_and_never_on_norms_and_biases(pool: WorkerPool, family: str) -> None:
    [found] = pool.run(1, decays, family)
    small = {name for name in found if "norm" in name or name.endswith("bias")}
    assert len(small) >= {"llama": 5, "qwen2": 11, "qwen3": 9}[family]
    assert {found[name] for name in small} == {0.0}
    matrices = found.keys() - small
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"} <= matrices
    assert {found[name] for name in matrices} == {0.25}


def test_a_flat_share_of_a_matrix_is_a_matrix_and_of_a_vector_a_vector() -> None:
    matrix, vector = share([1.0, 2.0], "m", shape=(4, 5)), share([1.0, 2.0], "v", shape=(4,))
    optimizer = make_adamw([matrix, vector], OptimSection(weight_decay=0.5))
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.5), (1, 0.0)]
    assert optimizer.param_groups[0]["params"][0] is matrix.master


def test_a_decay_step_shrinks_a_matrix_and_leaves_a_vector() -> None:
    matrix, vector = share([0.0, 0.0], "m", shape=(4, 5)), share([0.0, 0.0], "v", shape=(4,))
    for one in (matrix, vector):
        one.master.data.fill_(1.0)
    optimizer = make_adamw([matrix, vector], OptimSection(weight_decay=0.5, lr=0.1))
    optimizer.step()
    assert matrix.master.tolist() == [0.95, 0.95]
    assert vector.master.tolist() == [1.0, 1.0]


class LayerWise(RandomTask):
    """Freezes the embedding, and takes the optimizer's seat: SGD with a rate of its own for each parameter."""

    @hookimpl
    def femto_transform_model(self, model: FullModel) -> None:
        model.module.model.embed_tokens.weight.requires_grad_(False)

    @hookimpl
    def femto_optimizer(self, shares: Sequence[ParamShare]) -> torch.optim.Optimizer:
        assert all(share.master.requires_grad and share.master.numel() for share in shares)
        return torch.optim.SGD([{"params": [s.master], "lr": 0.1 * (n + 1)} for n, s in enumerate(shares)])


def layer_wise_rates(folder: str, resume: str) -> list[tuple[float, list[float]]]:
    values = {
        "run": {"dir": folder},
        "checkpoint": {"resume": resume},
        "optim": {"warmup": 2, "lr": 0.5},
        "model": {"tied": False},
    }
    trainer = make_trainer(values, (), {"task": LayerWise()})
    assert len(trainer.shares) == len(trainer.optimizer.param_groups) + 1
    seen = []
    for _ in range(3):
        info = trainer.train_step()
        seen.append((info.lr, [part["lr"] for part in trainer.optimizer.param_groups]))
    trainer.save()
    trainer.checkpointer.wait()
    trainer.close()
    return seen


def test_each_parameter_group_keeps_its_own_peak_and_follows_the_schedule_resumed_too(
    pool: WorkerPool, tmp_path: Path
) -> None:
    expected = factors(6, warmup=2)
    for resume, part in (("none", expected[:3]), ("auto", expected[3:])):
        [seen] = pool.run(1, layer_wise_rates, str(tmp_path), resume)
        for (nominal, rates), factor in zip(seen, part, strict=True):
            assert nominal == pytest.approx(0.5 * factor)
            assert rates == pytest.approx([0.1 * (n + 1) * factor for n in range(len(rates))])


def test_a_rank_without_anything_to_train_steps_and_clips() -> None:
    frozen, empty = share([]), share([])
    frozen.master.requires_grad_(False)
    frozen.master.grad = empty.master.grad = None
    optimizer = make_adamw([], OptimSection())
    clip_grads([frozen, empty], norm=5.0, limit=1.0)
    scale_lr(optimizer, 0.5)
    optimizer.step()


# Learning-rate schedules.


def factors(steps: int, **settings: Any) -> list[float]:
    schedule = make_lr_schedule(OptimSection(**settings), steps)
    return [schedule(step) for step in range(steps)]


@pytest.mark.parametrize("min_ratio", [0.0, 0.1])
@pytest.mark.parametrize("decay", [0, 1, 3, 1000])
@pytest.mark.parametrize(
    ("warmup", "steps"), [(0, 1), (0, 2), (0, 300), (1, 2), (1, 5), (4, 5), (4, 6), (4, 10), (299, 300)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_update_is_at_zero_or_above_the_peak(
    name: ScheduleName, warmup: int, steps: int, decay: int, min_ratio: float
) -> None:
    values = factors(steps, schedule=name, warmup=warmup, decay=decay, min_ratio=min_ratio)
    assert all(0 < value <= 1 for value in values)
    assert all(value >= min_ratio for value in values[warmup:])
    assert values[:warmup] == pytest.approx([(step + 1) / (warmup + 1) for step in range(warmup)])
    assert values[warmup] == 1, "the peak follows warm-up at once"
    assert all(a >= b for a, b in itertools.pairwise(values[warmup:])), "it never rises again"


def test_cosine_falls_along_a_half_wave_to_the_floor() -> None:
    values = factors(12, schedule="cosine", warmup=2, min_ratio=0.2)
    wave = [0.2 + 0.8 * (1 + math.cos(math.pi * step / 9)) / 2 for step in range(10)]
    assert values == pytest.approx([1 / 3, 2 / 3, *wave])


def test_linear_falls_along_a_line_and_stops_at_the_floor() -> None:
    values = factors(12, schedule="linear", warmup=2, min_ratio=0.25)
    assert values == pytest.approx([1 / 3, 2 / 3, *[max(0.25, 1 - step / 10) for step in range(10)]])


def test_constant_stays_at_the_peak() -> None:
    assert factors(6, schedule="constant", warmup=2) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1])


@pytest.mark.parametrize("min_ratio", [0.01, 0.1])
@pytest.mark.parametrize("decay", [0, 1, 3, 7])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 2), (0, 300), (1, 3), (4, 6), (4, 20)])
@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_the_last_update_is_at_the_floor(
    name: ScheduleName, warmup: int, steps: int, decay: int, min_ratio: float
) -> None:
    values = factors(steps, schedule=name, warmup=warmup, decay=decay, min_ratio=min_ratio)
    assert values[-1] == pytest.approx(min_ratio)


@pytest.mark.parametrize(("decay", "stable"), [(4, 6), (0, 8), (1, 9), (10, 1), (1000, 1)])
def test_wsd_is_stable_and_then_decays_for_as_long_as_it_is_told(decay: int, stable: int) -> None:
    values = factors(12, schedule="wsd", warmup=2, decay=decay, min_ratio=0.1)
    assert values[2 : 2 + stable] == [1.0] * stable
    length = 10 - stable
    shape = [0.1 + 0.9 * (1 + math.cos(math.pi * step / length)) / 2 for step in range(1, length + 1)]
    assert values[2 + stable :] == pytest.approx(shape)


def test_the_factor_depends_on_the_step_alone() -> None:
    schedule = make_lr_schedule(OptimSection(warmup=3), 20)
    forwards = [schedule(step) for step in range(20)]
    assert [schedule(step) for step in reversed(range(20))] == forwards[::-1]
    assert make_lr_schedule(OptimSection(warmup=3), 20)(7) == forwards[7]


def rates_in_training() -> list[list[float]]:
    trainer = make_trainer({"optim": {"warmup": 2, "lr": 0.5}})
    seen = []
    for _ in range(6):
        info = trainer.train_step()
        seen.append([info.lr, *[part["lr"] for part in trainer.optimizer.param_groups]])
    trainer.close()
    return seen


def test_the_trainer_uses_the_schedule_once_a_step_whatever_the_number_of_ranks(pool: WorkerPool) -> None:
    expected = [[0.5 * value] * 3 for value in factors(6, warmup=2)]
    for size in (1, 4):
        for answer in pool.run(size, rates_in_training):
            assert answer == expected


# The norm.


def world_norm(shares: Sequence[ParamShare], mesh: Mesh) -> float:
    return math.sqrt(mesh.sum_world(grad_norm_squared(shares, mesh)).item())


def two_stages() -> float:
    """Norms sqrt(20) and sqrt(100), of different parameters on two ranks."""
    mesh = Mesh([Axis("pp", 2, 10, "nothing")], CPU)
    return world_norm([share([2.0, 4.0]) if mesh.coordinate("pp") == 0 else share([6.0, 8.0])], mesh)


def test_the_norm_over_stages_is_that_of_all_parameters_and_no_mean(pool: WorkerPool) -> None:
    assert pool.run(2, two_stages) == [pytest.approx(10.954, abs=1e-3)] * 2


def replicas_and_shards() -> float:
    """On tp 2 x dp 2: a norm weight held by all (3), a matrix cut over tp (4 and 12), a share for each rank (1)."""
    mesh = Mesh([Axis("tp", 2, 100, "nothing")], CPU)
    cut = [4.0] if mesh.coordinate("tp") == 0 else [12.0]
    shares = [
        share([3.0], "norm", ("dp", "tp")),
        share(cut, "matrix", ("dp",)),
        share([1.0], "share", ()),
        share([], "nothing", ()),
    ]
    tied = share([100.0], "copy", ("dp", "tp"))
    tied = attrs.evolve(tied, layout=attrs.evolve(tied.layout, tied="embedding", primary=False))
    no_gradient = share([100.0], "frozen", ())
    no_gradient.master.grad = None
    return world_norm([*shares, tied, no_gradient], mesh)


def test_what_is_replicated_counts_once_and_what_is_cut_counts_wholly(pool: WorkerPool) -> None:
    assert pool.run(4, replicas_and_shards) == [pytest.approx(math.sqrt(9 + 16 + 144 + 4), rel=1e-15)] * 4


def sums_in_one_process(values: Sequence[float]) -> float:
    return world_norm([share([value], str(value)) for value in values], Mesh([], CPU))


@pytest.mark.parametrize("values", [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, math.inf)])
def test_a_value_that_is_not_finite_makes_the_norm_not_finite(pool: WorkerPool, values: Sequence[float]) -> None:
    assert not math.isfinite(pool.run(1, sums_in_one_process, values)[0])


def test_no_gradient_at_all_has_norm_zero(pool: WorkerPool) -> None:
    assert pool.run(2, sums_in_one_process, ()) == [0.0, 0.0]


# Clipping.


def test_clipping_scales_all_gradients_to_the_limit() -> None:
    shares = [share([3.0]), share([0.0, 4.0])]
    clip_grads(shares, norm=5.0, limit=1.0)
    assert [s.master.grad.tolist() for s in shares if s.master.grad is not None] == [
        [pytest.approx(0.6)],
        [0.0, pytest.approx(0.8)],
    ]


@pytest.mark.parametrize(("norm", "limit"), [(5.0, 5.0), (5.0, 6.0), (5.0, 0.0), (0.0, 1.0)])
def test_a_norm_within_the_limit_or_no_limit_changes_nothing(norm: float, limit: float) -> None:
    one = share([3.0, 4.0])
    clip_grads([one], norm=norm, limit=limit)
    assert one.master.grad is not None
    assert one.master.grad.tolist() == [3.0, 4.0]


def clipped_norms(clip: float) -> list[tuple[float, float]]:
    """(norm before, norm of what the optimizer saw) of each step."""
    trainer = make_trainer({"optim": {"clip": clip}})
    seen: list[float] = []

    def measure(*_: Any) -> None:
        grads = [g.master.grad for g in trainer.shares if g.master.grad is not None]
        seen.append(math.sqrt(sum(float(grad.square().sum()) for grad in grads)))

    trainer.optimizer.register_step_pre_hook(measure)
    before = [trainer.train_step().grad_norm for _ in range(6)]
    trainer.close()
    return list(zip(before, seen, strict=True))


@pytest.mark.parametrize("clip", [0.0, 0.25, 1.0])
def test_the_optimizer_sees_gradients_no_longer_than_the_clip(pool: WorkerPool, clip: float) -> None:
    for answer in pool.run(2, clipped_norms, clip):
        for before, after in answer:
            assert after == pytest.approx(min(before, clip or math.inf), rel=1e-12)
            assert before > 0.5

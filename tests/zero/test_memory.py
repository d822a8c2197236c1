"""What is there when, counted in bytes of storage: units of stage 3, gradients of stage 2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import backward
from torch.autograd.graph import saved_tensors_hooks

from femto_core.batch import Batch
from femto_core.trainer import Trainer
from femto_ops import collectives
from femto_tools.testing import RandomTask, WorkerPool, make_trainer
from femto_zero.gradients import IN_FLIGHT, GradientShards
from femto_zero.units import Unit
from femto_zero.whole import WholeWeights
from tests.merging import Values, merged
from tests.zero.tasks import HardTask, live_bytes, units_of, whole_bytes


def live(trainer: Trainer) -> list[str]:
    """The units whose weights are there."""
    found = [unit.name for unit in units_of(trainer) if live_bytes(unit)]
    assert all(live_bytes(unit) in (0, whole_bytes(unit)) for unit in units_of(trainer))
    return found


def forward(trainer: Trainer, batch: Batch) -> torch.Tensor:
    hidden = trainer.stage.forward(batch.input_ids, batch)
    loss: torch.Tensor = trainer.loss(hidden, trainer.stage.head, batch)
    return loss


def finish_step(trainer: Trainer) -> None:
    trainer.sharding.finish_gradients()
    trainer.update(norm=1.0, lr_factor=1.0)
    trainer.end_step()


def saved_bytes(trainer: Trainer, batches: Sequence[Batch]) -> tuple[int, list[torch.Tensor]]:
    """Run all forward passes; return the bytes of what they keep for backward besides parameters, and the losses."""
    own = {p.untyped_storage()._cdata for _, p in trainer.stage.named_parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        losses = [forward(trainer, batch) for batch in batches]
    return sum(kept.values()), losses


def in_flight(section: dict[str, Any], tied: bool, layers: int) -> dict[str, Any]:
    """Four forward passes, then their backwards, as a pipeline would."""
    values: Values = {"model": {"tied": tied, "layers": layers}, "data": {"micro_batch": 1}}
    plain = make_trainer(values)
    batches = plain.loader.next_step()
    plain_bytes, losses = saved_bytes(plain, batches)
    plain.close()
    trainer = make_trainer(merged(values, {"zero": section}), ("zero3",))
    seen: dict[str, Any] = {"start": live(trainer)}
    sharded_bytes, others = saved_bytes(trainer, trainer.loader.next_step())
    assert [loss.item() for loss in losses] == [loss.item() for loss in others]
    seen |= {"forward": live(trainer), "extra": sharded_bytes - plain_bytes, "backward": []}
    most = [0]

    def look(_: Any) -> None:
        most[0] = max(most[0], len(live(trainer)))

    handles = [p.register_hook(look) for _, p in trainer.stage.named_parameters()]  # type: ignore[no-untyped-call]
    for number, loss in enumerate(others):
        if number < len(others) - 1:
            with trainer.sharding.no_sync():
                backward(loss)
        else:
            backward(loss)
            trainer.sharding.finish_gradients()
        seen["backward"].append(live(trainer))
    for handle in handles:
        handle.remove()
    seen["most"] = most[0]
    trainer.update(norm=1.0, lr_factor=1.0)
    trainer.end_step()
    seen["step"] = live(trainer)
    trainer.close()
    return seen


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_four_forward_passes_in_flight_keep_no_copy_of_a_unit(pool: WorkerPool, prefetch: int, tied: bool) -> None:
    """What a forward pass keeps for backward are activations, as without sharding; weights are there once or not."""
    for seen in pool.run(2, in_flight, {"prefetch": prefetch}, tied, 5):
        assert seen["start"] == []
        assert seen["extra"] == 0, "a copy of a weight was kept"
        assert len(seen["forward"]) == 1, "that whose backward comes next"
        assert seen["backward"] == [[]] * 4
        assert seen["step"] == []
        assert seen["most"] <= 1 + prefetch, "the unit that computes, and those that come next"


def test_without_resharding_units_are_kept_once_until_their_backward(pool: WorkerPool) -> None:
    section = {"prefetch": 1, "reshard_after_forward": False}
    for seen in pool.run(2, in_flight, section, False, 2):
        assert seen["extra"] == 0
        assert seen["forward"] == ["model.layers.0", "model.layers.1", "after"]
        assert seen["backward"] == [[]] * 4
        assert seen["step"] == []


def during_forward(prefetch: int, tied: bool) -> tuple[list[int], list[str]]:
    trainer = make_trainer({"model": {"tied": tied, "layers": 5}, "zero": {"prefetch": prefetch}}, ("zero3",))
    counts: list[int] = []

    def look(*_: Any) -> None:
        counts.append(len(live(trainer)))

    handles = [layer.self_attn.register_forward_hook(look) for layer in trainer.stage.body.layers.children()]
    trainer.evaluate()
    for handle in handles:
        handle.remove()
    left = live(trainer)
    trainer.close()
    return counts, left


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_evaluation_gathers_a_few_units_at_a_time_and_leaves_none(pool: WorkerPool, prefetch: int, tied: bool) -> None:
    for counts, left in pool.run(2, during_forward, prefetch, tied):
        assert max(counts) <= 1 + prefetch + tied, "the embedding stays for the head that it is tied to"
        assert left == []


def frozen_in_backward(prefetch: int, recompute: str) -> list[list[str]]:
    task = HardTask(frozen=("embed_tokens", "layers.0.", "layers.1."), recompute=recompute)
    values: Values = {"model": {"tied": False, "layers": 4}, "zero": {"prefetch": prefetch}}
    trainer = make_trainer(values, ("zero3",), {"random_task": task})
    seen = []
    for batch in trainer.loader.next_step()[:3]:
        with trainer.sharding.no_sync():
            backward(forward(trainer, batch))
        seen.append(live(trainer))
    trainer.close()
    return seen


@pytest.mark.parametrize("recompute", ["", "region"])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_frozen_first_layers_are_not_left_behind_by_a_backward(pool: WorkerPool, prefetch: int, recompute: str) -> None:
    """Backward ends at the first trained layer: nothing below it is gathered, or it is released again."""
    for seen in pool.run(2, frozen_in_backward, prefetch, recompute):
        assert seen == [[]] * 3


def recomputed_in_backward(recompute: str) -> list[list[str]]:
    values: Values = {"model": {"tied": False, "layers": 3}, "zero": {"prefetch": 1}}
    trainer = make_trainer(values, ("zero3",), {"random_task": HardTask(recompute=recompute)})
    seen = []
    for batch in trainer.loader.next_step()[:2]:
        with trainer.sharding.no_sync():
            backward(forward(trainer, batch))
        seen.append(live(trainer))
    trainer.close()
    return seen


@pytest.mark.parametrize("recompute", ["layer", "region", "both", "reentrant region"])
def test_recomputed_units_are_not_left_behind_by_a_backward(pool: WorkerPool, recompute: str) -> None:
    for seen in pool.run(2, recomputed_in_backward, recompute):
        assert seen == [[]] * 2


# Gradients.


def watch_gradients(plugin: str, values: Values, watch: Callable[[GradientShards], None]) -> Trainer:
    trainer = make_trainer(values, (plugin,))
    sharding: Any = trainer.sharding
    gradients = sharding._gradients
    real = collectives.reduce_scatter

    def looking(*arguments: Any) -> Any:
        watch(gradients)
        return real(*arguments)

    with mock.patch.object(collectives, "reduce_scatter", looking):
        for batch in trainer.loader.next_step():
            with trainer.sharding.no_sync():
                backward(forward(trainer, batch))
            watch(gradients)
    return trainer


def stage_2_gradients() -> dict[str, Any]:
    most, flying = [0], [0]

    def watch(gradients: GradientShards) -> None:
        most[0] = max(most[0], sum(b.flat.untyped_storage().nbytes() for b in gradients._collector.buckets))
        flying[0] = max(flying[0], len(gradients._in_flight))

    values: Values = {"model": {"tied": False, "layers": 4}, "zero": {"bucket_mib": 0.002}, "data": {"micro_batch": 1}}
    trainer = watch_gradients("zero2", values, watch)
    sharding = trainer.sharding
    assert isinstance(sharding, WholeWeights)
    gradients = sharding._gradients
    with trainer.sharding.no_sync():  # whatever is left over lands with the next bucket, or at the step's end
        pass
    gradients.sync()
    whole = sum(flat.nbytes for flat in sharding._flats)
    seen = {
        "buckets": len(gradients._collector.buckets),
        "largest": max(flat.nbytes for flat in sharding._flats),
        "most": most[0],
        "layer": sum(p.numel() * p.element_size() for p in trainer.stage.body.layers["0"].parameters()),
        "flying": flying[0],
        "full": sum(b.flat.numel() for b in gradients._collector.buckets),
        "grads": sum(p.grad is not None for _, p in trainer.stage.named_parameters()),
        "share": sum(s.untyped_storage().nbytes() for s in gradients._shares.values()) / whole,
        "in flight": len(gradients._in_flight),
    }
    trainer.sharding.finish_gradients()
    assert not gradients._shares, "handed over"
    trainer.precision.zero_grad(trainer.shares)
    trainer.close()
    return seen


def test_stage_2_frees_full_gradients_as_they_are_reduced(pool: WorkerPool) -> None:
    for seen in pool.run(2, stage_2_gradients):
        assert seen["buckets"] >= 8
        # Buckets go in their order, and a layer's first norm, which is early in that order, is the last to be ready.
        assert seen["most"] <= seen["layer"] + 2 * seen["largest"]
        assert seen["flying"] <= IN_FLIGHT
        assert (seen["full"], seen["grads"], seen["in flight"]) == (0, 0, 0)
        assert seen["share"] == pytest.approx(1 / 2)


def optimizer_bytes(plugins: tuple[str, ...]) -> tuple[int, int]:
    trainer = make_trainer({"model": {"layers": 4, "tied": False}}, plugins, {"random_task": RandomTask()})
    trainer.train_step()
    state = sum(
        t.untyped_storage().nbytes()
        for entry in trainer.optimizer.state.values()
        for name, t in entry.items()
        if name != "step"
    )
    weights = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for _, p in trainer.stage.named_parameters()}
    weights |= {g.master.untyped_storage()._cdata: g.master.untyped_storage().nbytes() for g in trainer.shares}
    trainer.close()
    return state, sum(weights.values())


def test_four_ranks_keep_a_quarter_of_the_optimizer_state_and_in_stage_3_of_the_weights(pool: WorkerPool) -> None:
    plain, one, two, three = (
        pool.run(4, optimizer_bytes, plugins) for plugins in ((), ("zero1",), ("zero2",), ("zero3",))
    )
    whole_state, whole_weights = plain[0]
    for stage in (one, two, three):
        assert sum(state for state, _ in stage) == whole_state
        assert max(state for state, _ in stage) < 0.35 * whole_state
    assert all(weights < 1.1 * whole_weights for _, weights in [*one, *two])
    assert all(weights < 0.35 * whole_weights for _, weights in three)


def unit_life() -> list[int]:
    trainer = make_trainer({}, ("zero3",))
    unit: Unit = units_of(trainer)[1]
    sizes = [live_bytes(unit)]
    for act in (unit.start_gather, unit.start_gather, unit.gather, unit.gather, unit.release, unit.release):
        act()
        sizes.append(live_bytes(unit))
    trainer.close()
    return [size // whole_bytes(unit) for size in sizes]


def test_gathering_and_releasing_twice_is_once(pool: WorkerPool) -> None:
    assert pool.run(2, unit_life) == [[0, 1, 1, 1, 1, 0, 0]] * 2

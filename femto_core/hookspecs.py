"""Every hook of femto, in the order in which the kernel first calls them. No logic here.

Two kinds. A *seat* is taken by exactly one active plugin: it returns one strategy object, and where nobody takes it the
kernel's own default sits there. A *collecting* hook is called on all active plugins. The objects that seats return are
called directly afterwards; no hook is called inside the micro-batch loop.

A hook implementation may take any subset of the arguments, by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from femto_core.checkpoint import Checkpointer, Stateful
    from femto_core.cli import CommandRegistry
    from femto_core.config import Config
    from femto_core.data import Collator, Dataset
    from femto_core.loss import Loss
    from femto_core.mesh import Axis, Mesh
    from femto_core.metrics import StepInfo
    from femto_core.model import FullModel, Stage
    from femto_core.optim import LRSchedule
    from femto_core.precision import MixedPrecisionManager, ParamGroup
    from femto_core.schedule import Schedule
    from femto_core.sharding import ShardingStrategy
    from femto_core.sync import GradientSynchronizer
    from femto_core.trainer import Trainer

spec = pluggy.HookspecMarker("femto")
hookimpl = pluggy.HookimplMarker("femto")


@spec
def femto_commands(registry: CommandRegistry) -> None:
    """Register further subcommands: `registry.add(name, help, function)`.

    When: plugins are loaded, and the command is about to be looked up; not for `train`, which needs no looking up.
    Default: none.
    """


@spec
def femto_config_section() -> tuple[str, type[Any]]:
    """Return the plugin's config section as (name, frozen attrs class whose fields all have defaults).

    When: plugins are loaded; settings are about to be read from file and flags. Default: none.
    """
    raise NotImplementedError


@spec
def femto_config_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return defaults that suit the plugin's kind of run better than a section's own, as {section: {key: value}}.

    When: right after the sections; file and flags win over them, and of two plugins the one that was named later.
    Default: none.
    """
    raise NotImplementedError


@spec
def femto_validate(config: Config) -> None:
    """Refuse a combination of settings by raising `UserError`.

    When: the config is complete; no process group exists yet. Default: the kernel's own checks.
    """


@spec
def femto_mesh_axes(config: Config) -> Sequence[Axis]:
    """Return the mesh axes the plugin adds, as `Axis(name, size, order)`; a larger order lies further inside.

    When: the ranks have found each other, and the groups along the axes are about to be made. `dp` (order 50) is what
    remains of the world. Default: no axis but `dp`.
    """
    raise NotImplementedError


@spec(firstresult=True)
def femto_dataset(config: Config, split: str) -> Dataset | None:
    """Return the rows of `split` ("train" or "held_out") as a stateless dataset looked up by index.

    When: once for each split, after the mesh exists; on every rank. None: the next implementation is asked; for
    "held_out" an empty dataset means that there is none. Default: `data.path`, or the standard library's sources.
    """


@spec(firstresult=True)
def femto_collator(config: Config) -> Collator | None:
    """Return the function that turns a list of samples into a `Batch`: what a batch means differs by task.

    When: after the datasets. None: the next implementation is asked. Default: next-token prediction on packed rows.
    """


@spec(firstresult=True)
def femto_model(config: Config) -> FullModel | None:
    """Return the full model on the meta device, and where its weights come from.

    When: after the data (`config.model.vocab_size` is known). None: the next implementation is asked.
    Default: transformers, from `model.path` or from sizes.
    """


@spec
def femto_transform_model(model: FullModel, config: Config) -> None:
    """Add parameters to the full model (and to its weight source) or freeze some (LoRA), in place, on the meta device.

    When: after `femto_model`, before it is cut into stages. Default: nothing.
    """


@spec(firstresult=True)
def femto_schedule(config: Config, mesh: Mesh) -> Schedule | None:
    """Return what cuts the model into this rank's stage and runs the micro-batches through it.

    When: after the model is transformed. None: the next implementation is asked.
    Default: one stage, micro-batches in sequence.
    """


@spec
def femto_parallelize(stage: Stage, mesh: Mesh, config: Config) -> None:
    """Replace modules of the stage, in place, on the meta device, and record each new parameter's `ParamLayout`.

    When: after the schedule has cut the stage. Default: nothing.
    """


@spec
def femto_wrap_layer(name: str, layer: nn.Module, config: Config) -> nn.Module | None:
    """Return a wrapper around one decoder layer; names of parameters may not change. None: leave it as it is.

    When: for every layer of the stage, after `femto_parallelize`; the wrapper of the plugin loaded last lies
    innermost.
    Default: `torch.compile` where asked for.
    """


@spec(firstresult=True)
def femto_precision(config: Config) -> MixedPrecisionManager | None:
    """Return what decides the dtypes of weights and masters, and carries values between the two.

    When: before the stage is given memory. None: the next implementation is asked. Default: one dtype for everything.
    """


@spec(firstresult=True)
def femto_sharding(config: Config, mesh: Mesh) -> ShardingStrategy | None:
    """Return what gives the stage memory and decides which part of it this rank keeps and updates.

    When: after precision. None: the next implementation is asked. Default: everything on every rank.
    """


@spec(firstresult=True)
def femto_grad_sync(config: Config, mesh: Mesh, sharding: ShardingStrategy) -> GradientSynchronizer | None:
    """Return what sums gradients over ranks; where the strategy in the sharding seat does that too, `sharding` itself.

    When: after sharding. None: the next implementation is asked. Default: bucketed all-reduce; nothing on one rank.
    """


@spec(firstresult=True)
def femto_optimizer(config: Config, groups: Sequence[ParamGroup]) -> torch.optim.Optimizer | None:
    """Return the optimizer over the masters of `groups`: those that are trained and of which this rank owns something.

    That may be none. The schedule's factor scales the learning rate that each parameter group is made with, so groups
    may differ. One update may call `step()` several times, each time with gradients on some of the parameters only
    (a precision plugin widens them part by part): what has no gradient must be left alone, its state and any count of
    steps included.

    When: after weights are loaded. None: the next implementation is asked. Default: AdamW, decay on matrices only.
    """


@spec(firstresult=True)
def femto_lr_schedule(config: Config) -> LRSchedule | None:
    """Return a pure function from the step (from 0) to the factor on each parameter group's peak learning rate.

    When: after the optimizer. None: the next implementation is asked. Default: warm-up, then `optim.schedule`.
    """


@spec(firstresult=True)
def femto_loss(config: Config, mesh: Mesh) -> Loss | None:
    """Return (hidden states, head, targets) -> summed loss; the head is inside, so full logits need never exist.

    When: after the learning-rate schedule. None: the next implementation is asked. Default: chunked cross-entropy.
    """


@spec(firstresult=True)
def femto_checkpointer(config: Config, mesh: Mesh) -> Checkpointer | None:
    """Return what saves and loads a run.

    When: after the loss. None: the next implementation is asked. Default: files that load under any layout.
    """


@spec
def femto_checkpoint_state() -> tuple[str, Stateful]:
    """Return (name, object with state_dict and load_state_dict): a part to save and load with the run.

    When: once, before the first save or load; a save follows `femto_step_end` of its step. Default: none.
    """
    raise NotImplementedError


@spec
def femto_train_begin(trainer: Trainer) -> None:
    """Everything is built and loaded; training starts. When: once, on every rank."""


@spec
def femto_step_begin(step: int) -> None:
    """A step is about to start. When: before each step, on every rank, with its number from 1."""


@spec
def femto_step_end(info: StepInfo) -> None:
    """A step is over. When: after each step, on every rank, in the same order: collectives are allowed.

    The step is not logged, evaluated or saved yet.
    """


@spec
def femto_log(step: int, metrics: dict[str, float]) -> None:
    """Numbers to show or record. When: on rank 0 only, after each `femto_step_end` and evaluation; no collectives."""


@spec
def femto_train_end(trainer: Trainer) -> None:
    """Training is over, by its last step, `train.stop_after` or an exception. When: once, on every rank.

    Also where a plugin's `femto_train_begin` raised, so that of this one perhaps was not called. No collectives:
    another rank may be gone.
    """

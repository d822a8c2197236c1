"""Every hook of femto, in the order in which the kernel first calls them. No logic here.

Two kinds. A *seat* is taken by one active plugin, which returns one strategy object; where nobody takes it, the
kernel's default does. Other plugins may wrap a seat (`hookimpl(wrapper=True)`), which claims nothing. A *collecting*
hook is called on all active plugins, the last named first, unless a plugin asks for another place (`tryfirst`,
`trylast`). Strategy objects are called directly afterwards: no hook is called inside the micro-batch loop.

Each hook has a role. "layout" hooks lay a run out, "content" hooks decide what it computes, and "observe" hooks only
look on; "setup" hooks belong to commands, settings and files. `femto verify` tells plugins apart by these roles.

A hook implementation may take any subset of the arguments, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from femto_core.checkpoint import Checkpointer, ExportTensor, Stateful
    from femto_core.commands import CommandRegistry
    from femto_core.config import Config
    from femto_core.data import Collator, Dataset, Loader, TokenSplit
    from femto_core.loss import TaskLoss, TokenStatistics
    from femto_core.mesh import Axis, Mesh
    from femto_core.metrics import StepInfo
    from femto_core.model import FullModel, Stage
    from femto_core.optim import LRSchedule
    from femto_core.precision import ParamShare, Precision
    from femto_core.schedule import Schedule
    from femto_core.sharding import ShardingStrategy
    from femto_core.trainer import Trainer

Role = Literal["setup", "layout", "content", "observe"]
F = TypeVar("F", bound=Callable[..., Any])
hookimpl = pluggy.HookimplMarker("femto")


def spec(role: Role, *, seat: bool = False) -> Callable[[F], F]:
    """Mark a function as the specification of a hook."""

    def mark(function: F) -> F:
        function.femto_role = role  # type: ignore[attr-defined]
        return pluggy.HookspecMarker("femto")(function, firstresult=seat)

    return mark


@spec("setup")
def femto_commands(registry: CommandRegistry) -> None:
    """Register further subcommands: `registry.add(name, help, options, function)`.

    When: plugins are loaded, and the command is about to be looked up. `train` and `plugins` are the kernel's own.
    Default: none.
    """


@spec("setup")
def femto_config_section() -> tuple[str, type[Any]]:
    """Return the plugin's config section as (name, frozen attrs class whose fields all have defaults).

    When: plugins are loaded; settings are about to be read from file and flags. Default: none.
    """
    raise NotImplementedError


@spec("setup")
def femto_config_defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return defaults that suit the plugin's kind of run better than a section's own, as {section: {key: value}}.

    When: right after the sections. File and flags win over them; of two plugins, the one named later wins.
    Default: none.
    """
    raise NotImplementedError


@spec("setup")
def femto_validate(config: Config) -> None:
    """Refuse a combination of settings by raising `UserError`.

    When: the config is complete; no process group exists yet. Default: the kernel's own checks.
    """


@spec("layout")
def femto_mesh_axes(config: Config) -> Sequence[Axis]:
    """Return the mesh axes the plugin adds, as `Axis(name, size, order, splits)`.

    A larger order means faster-varying ranks (closer together, for instance within a machine); `dp` has order 50 and
    the size that remains of the world. `splits` says what differs between the batches of the axis's ranks.

    When: the ranks have found each other, and the groups along the axes are about to be made. Default: `dp` alone.
    """
    raise NotImplementedError


@spec("content", seat=True)
def femto_dataset(config: Config, split: str) -> Dataset | None:
    """Return the rows of `split` ("train" or "held_out") as a stateless dataset looked up by index.

    When: once for each split, after the mesh exists; on every rank. None: the next implementation is asked; for
    "held_out" an empty dataset means that there is none. Default: `data.path`, or the standard library's sources.
    """


@spec("content", seat=True)
def femto_collator(config: Config) -> Collator | None:
    """Return the function that turns a list of samples into a `Batch`: what a batch means differs by task.

    When: after the datasets. None: the next implementation is asked. Default: next-token prediction on packed rows.
    """


@spec("layout", seat=True)
def femto_split_tokens(config: Config, mesh: Mesh) -> TokenSplit | None:
    """Return the function from a batch of whole rows to this rank's part of their tokens.

    It is applied to all batches of the collator. `Batch.tokens` cuts; what attention needs goes into `Batch.extra`.

    When: after the collator. None: the next implementation is asked. Default: consecutive, equal parts over the axes
    that split tokens; whole rows where there are none.
    """


@spec("content", seat=True)
def femto_loader(config: Config, mesh: Mesh, dataset: Dataset, collator: Collator) -> Loader | None:
    """Return what makes a step's micro-batches, with a state that checkpoints keep.

    `collator` splits tokens already. A loader that needs the trainer (for rollouts) gets it in `femto_train_begin`.

    When: after the token split. None: the next implementation is asked. Default: a pure function of seed and step.
    """


@spec("content", seat=True)
def femto_model(config: Config) -> FullModel | None:
    """Return the full model on the meta device, and where its weights come from.

    When: after the data (`config.model.vocab_size` is known). None: the next implementation is asked.
    Default: transformers, from `model.path` or from sizes.
    """


@spec("content")
def femto_transform_model(model: FullModel, config: Config) -> None:
    """Change the full model, in place, on the meta device: add parameters (and to its weight source), freeze others.

    When: after `femto_model`, before it is cut into stages. Default: nothing.
    """


@spec("layout", seat=True)
def femto_schedule(config: Config, mesh: Mesh) -> Schedule | None:
    """Return what cuts the model into this rank's stage and runs the micro-batches through it.

    When: after the model is transformed, and once more for every further stage that a plugin builds. None: the next
    implementation is asked. Default: one stage, micro-batches in sequence.
    """


@spec("layout")
def femto_parallelize(stage: Stage, mesh: Mesh, config: Config) -> None:
    """Replace modules of the stage, in place, on the meta device, and record each new parameter's `ParamLayout`.

    When: after the schedule has cut the stage. Default: nothing.
    """


@spec("layout")
def femto_wrap_layer(name: str, layer: nn.Module, stage: Stage, config: Config) -> nn.Module | None:
    """Return a wrapper around one decoder layer; names of parameters may not change. None: leave it as it is.

    When: for every layer of the stage, after `femto_parallelize`; the last named plugin's wrapper is the innermost.
    Default: `torch.compile` where asked for.
    """


@spec("layout", seat=True)
def femto_precision(config: Config, mesh: Mesh) -> Precision | None:
    """Return what decides the dtypes of weights and masters, and copies values between the two.

    When: before the stage is given memory. None: the next implementation is asked. Default: one dtype for everything.
    """


@spec("layout", seat=True)
def femto_sharding(config: Config, mesh: Mesh) -> ShardingStrategy | None:
    """Return what gives the stage memory, decides which part of it this rank keeps, and sums gradients.

    When: after precision. None: the next implementation is asked. Default: everything on every rank, gradients summed
    by a bucketed all-reduce.
    """


@spec("content", seat=True)
def femto_optimizer(config: Config, mesh: Mesh, shares: Sequence[ParamShare]) -> torch.optim.Optimizer | None:
    """Return the optimizer for the masters of `shares`: all trainable parameters of the stage.

    Ranks that hold the same parameters get shares of the same parameters in the same order; a rank's share may be
    empty, and its layout says how the others continue it. The schedule's factor scales the learning rate that each
    torch parameter group is made with, so groups may differ.

    One update calls `step()` once for each of the precision's groups, equally often on every rank, each time with
    gradients on that group's parameters only. So an optimizer may communicate in `step()`. It must leave alone what has
    no gradient, its state and any count of steps included.

    When: after weights are loaded. None: the next implementation is asked. Default: AdamW, decay on matrices only.
    """


@spec("content", seat=True)
def femto_lr_schedule(config: Config) -> LRSchedule | None:
    """Return a pure function from the step (from 0) to the factor on each parameter group's peak learning rate.

    When: after the optimizer. None: the next implementation is asked. Default: warm-up, then `optim.schedule`.
    """


@spec("layout", seat=True)
def femto_token_statistics(config: Config, mesh: Mesh) -> TokenStatistics | None:
    """Return what computes log-probabilities, entropies and cross-entropy from hidden states and the head.

    When: after the learning-rate schedule. None: the next implementation is asked. Default: a whole head, in chunks.
    """


@spec("content", seat=True)
def femto_loss(config: Config, mesh: Mesh) -> TaskLoss | None:
    """Return the task's loss: (token statistics, hidden states, head, batch) -> a sum, and its weight, the divisor.

    When: after the token statistics. None: the next implementation is asked. Default: cross-entropy, as a mean over the
    valid targets.
    """


@spec("setup", seat=True)
def femto_checkpointer(config: Config, mesh: Mesh) -> Checkpointer | None:
    """Return what saves and loads a run.

    When: after the loss. None: the next implementation is asked. Default: files that load under any layout.
    """


@spec("setup")
def femto_checkpoint_state() -> tuple[str, Stateful]:
    """Return (name, object with state_dict and load_state_dict): a part of checkpoints, equal on all ranks.

    When: once, before the first save or load; a save follows `femto_step_end` of its step. Default: none.
    """
    raise NotImplementedError


@spec("observe")
def femto_train_begin(trainer: Trainer) -> None:
    """Everything is built and loaded; training starts. When: once, on every rank."""


@spec("observe")
def femto_step_begin(trainer: Trainer, step: int) -> None:
    """A step is about to start. When: before each step, on every rank, with its number from 1."""


@spec("observe")
def femto_step_end(trainer: Trainer, info: StepInfo) -> None:
    """A step is over. When: after each step, on every rank, in the same order: collectives are allowed.

    The step is not logged, evaluated or saved yet.
    """


@spec("observe")
def femto_log(trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
    """Numbers to show or record. When: on rank 0 only, after each `femto_step_end` and evaluation; no collectives."""


@spec("observe")
def femto_train_end(trainer: Trainer, error: BaseException | None) -> None:
    """Training is over, by its last step, `train.stop_after`, a request to stop, or the exception `error`.

    When: once, on every rank, also when any plugin's `femto_train_begin` raised; yours may then never have run. No
    collectives: another rank may be gone.
    """


@spec("setup")
def femto_export(
    tensors: dict[str, ExportTensor], saved: Mapping[str, ExportTensor], settings: Mapping[str, Any]
) -> None:
    """Change, in place, what `femto export` writes: replace an entry of `tensors`, remove it, or add another.

    `tensors` holds every parameter's master under its name; `saved` everything in the checkpoint, as `FIELD/NAME`
    (`master/...`, `exp_avg/...`); `settings` are the run's own. Nothing is read before it is written.

    When: in the command `femto export`, with the plugins that it names, the last named first. Default: nothing.
    """

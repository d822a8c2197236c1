"""`femto verify`: a run's own configuration on several processes against the same on one, parameter by parameter.

Both train a few steps in float64 on the CPU. Plugins with "layout" hooks (axes, schedule, sharding, precision, layers
wrapped or rewritten) must not change a number, so the one process runs without them. Plugins that decide what is
computed (data, model, loss, optimizer) take part in both runs, and observers in neither.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from femto_core.cli import quiet_libraries
from femto_core.config import Config, config_class
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.plugins import BUILT_IN, Plugins, activate
from femto_core.sections import not_negative, positive
from femto_tools.dry_run import trial_of

BOUND = 1e-9
"""Largest accepted difference, relative to a tensor's largest element: float64 leaves six digits to spare."""


@attrs.frozen(kw_only=True)
class VerifyOptions:
    """Compare a run on several processes with the same run on one, parameter by parameter. Exits with 1 if they differ.

    --layers and --hidden shrink the model, which then starts from random weights.
    """

    nproc: int = attrs.field(default=2, validator=positive)
    """Processes."""
    steps: int = attrs.field(default=3, validator=positive)
    """Steps to train."""
    layers: int = attrs.field(default=0, validator=not_negative)
    """Layers of the model; 0: as many as the run's."""
    hidden: int = attrs.field(default=0, validator=not_negative)
    """Width of the model; 0: the run's."""


@attrs.frozen
class Difference:
    """The difference of two runs in one quantity, relative to its largest value."""

    what: str
    gradient: float
    """The largest of all steps."""
    weight: float

    @property
    def worst(self) -> float:
        return max(self.gradient, self.weight)


def verify_command(options: VerifyOptions, config: Config, plugins: Plugins) -> int:
    """Train both ways and print how far they are apart; return 1 if they differ."""
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        values = values_of(config, options.steps)
        shrink(values, options.layers, options.hidden, Path(folder))
        return verify(values, plugins, options.nproc)


def verify(values: dict[str, dict[str, Any]], plugins: Plugins, processes: int) -> int:
    """Train with `values` on `processes` and on one; print how far they are apart; return 1 where it is too far."""
    from femto_tools.testing import WorkerPool, assemble
    from femto_tools.workers import WorkerFailedError

    blocked = [f"no:{name}" for name in BUILT_IN if name not in {info.name for info in plugins.active}]
    own = [info for info in plugins.active if info.name not in BUILT_IN]
    layout = [info.name for info in own if "layout" in info.roles]
    content = [info.name for info in own if "content" in info.roles and info.name not in layout]
    alone, together = [*blocked, *content], [*blocked, *content, *layout]
    pool = WorkerPool(processes)
    try:
        one = pool.run(1, train, without_sections(values, alone), alone, timeout_s=3600)
        several = pool.run(processes, train, without_sections(values, together), together, timeout_s=3600)
    except WorkerFailedError as error:
        raise UserError(refusal_in(str(error)) or str(error)) from None
    finally:
        pool.close()
    print(f"{several[0]['mesh']} against one process, {len(one[0]['losses'])} steps in float64")
    both, distributed = (", ".join(names) or "none" for names in (content, layout))
    print(f"plugins in both runs: {both}; only in the distributed run: {distributed}")
    if narrow := [info.name for info in own if "femto_precision" in (*info.seats, *info.wraps)]:
        print(f"{', '.join(narrow)} computes in float64 here, too: its rounding is not compared")
    print()
    try:
        mine = assemble(several)
    except AssertionError as error:
        print(f"DIFFERENT: {error}")
        return 1
    return print_differences(list(compare(assemble(one), mine)), several[0]["uncut"])


def train(values: Mapping[str, Any], plugins: Sequence[str]) -> dict[str, Any]:
    """Train as a worker's job; return this rank's part of a `Record`, its mesh in words, and what was not cut."""
    import torch.distributed as dist

    from femto_core.launch import share_machine
    from femto_tools.testing import make_trainer, record_training

    share_machine(dist.get_world_size())
    trainer = make_trainer(values, plugins, {})
    return {"mesh": str(trainer.mesh), "uncut": uncut(trainer), **record_training(trainer)}


def uncut(trainer: Any) -> list[str]:
    """Return the axes along which plugins cut or shard, and which have one rank."""
    mesh = trainer.mesh
    asked = {axis.name for axis in mesh.axes} - {"dp"} | {a for share in trainer.shares for a in share.layout.sharded}
    return sorted(axis for axis in asked if mesh.size(axis) == 1)


def values_of(config: Config, steps: int) -> dict[str, dict[str, Any]]:
    """Return a run's settings for `steps` steps in float64, in a folder that goes with the trainer."""
    values = trial_of(config, "").to_dict()
    del values["plugins"], values["run"]
    values["train"] |= {"dtype": "float64", "stop_after": min(steps, config.train.steps), "threads": 1}
    return values


def shrink(values: dict[str, dict[str, Any]], layers: int, hidden: int, folder: Path) -> None:
    """Give the model `layers` and the width `hidden`, where they are not 0, and no dropout, whose numbers differ."""
    model = values["model"]
    if not model["path"]:
        resize(model, layers, hidden, "layers", "heads")
        return
    source = Path(model["path"])
    try:
        saved: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model.path = {model['path']!r}: its config.json cannot be read: {error}") from None
    for file in source.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    saved |= {key: 0.0 for key in saved if "dropout" in key}
    resize(saved, layers, hidden, "num_hidden_layers", "num_attention_heads")
    if "layer_types" in saved:
        saved["layer_types"] = saved["layer_types"][: saved["num_hidden_layers"]]
    if hidden:
        saved["head_dim"] = hidden // int(saved["num_attention_heads"])
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    model["path"] = str(folder)
    if layers or hidden:
        model["weights"] = "random"


def resize(sizes: dict[str, Any], layers: int, hidden: int, layers_key: str, heads_key: str) -> None:
    """Change number of layers and width; the MLP's width follows, heads become narrower."""
    if layers:
        sizes[layers_key] = layers
    if hidden:
        heads = int(sizes[heads_key])
        if hidden % (2 * heads):
            raise UserError(f"--hidden {hidden} does not cut into {heads} heads of even width")
        inner = int(sizes["intermediate_size"])  # 0 follows the width by itself
        sizes["intermediate_size"] = inner and max(1, inner * hidden // int(sizes["hidden_size"]))
        sizes["hidden_size"] = hidden


def without_sections(values: Mapping[str, Any], plugins: Sequence[str]) -> dict[str, Any]:
    """Return `values` without the sections of plugins that are not among `plugins`, and of built-in observers."""
    from femto_tools.testing import QUIET

    hooks = Hooks(activate([*QUIET, *plugins]).manager)
    known = {field.name for field in attrs.fields(config_class(hooks.config_sections()))}
    return {section: entries for section, entries in values.items() if section in known}


def refusal_in(failure: str) -> str:
    """Return the sentence of the `UserError` that ended a worker, or nothing where that was a defect."""
    lines = [line for line in failure.splitlines() if line.startswith(f"{UserError.__module__}.{UserError.__name__}: ")]
    return lines[0].partition(": ")[2] if lines else ""


def compare(one: Any, several: Any) -> Iterator[Difference]:
    """Yield losses, norms, and each parameter, in the order of forward."""
    import torch

    from femto_tools.testing import relative_difference as apart

    def series(mine: list[float], theirs: list[float]) -> float:
        return apart(torch.tensor(theirs, dtype=torch.float64), torch.tensor(mine, dtype=torch.float64))

    yield Difference("loss", series(one.losses, several.losses), 0.0)
    yield Difference("gradient norm", series(one.norms, several.norms), 0.0)
    nothing = torch.empty(0)
    for name in dict.fromkeys([*one.weights, *several.weights]):
        steps = zip(one.gradients, several.gradients, strict=True)
        gradients = [(mine.get(name, nothing), theirs.get(name, nothing)) for mine, theirs in steps]
        weights = one.weights.get(name, nothing), several.weights.get(name, nothing)
        yield Difference(name, max(apart(theirs, mine) for mine, theirs in gradients), apart(*reversed(weights)))


def print_differences(differences: Sequence[Difference], uncut: Sequence[str] = ()) -> int:
    """Print the table and its verdict; return 1 if a difference is larger than the bound.

    `uncut` are mesh axes that plugins asked for, and along which there is one rank: what they cut was not compared.
    """
    width = max(len(difference.what) for difference in differences)
    print(f"{'relative difference':<{width}}  {'gradient':>9}  {'weight':>9}")
    for difference in differences:
        mark = "  <--" if not difference.worst < BOUND else ""
        print(f"{difference.what:<{width}}  {difference.gradient:>9.1e}  {difference.weight:>9.1e}{mark}")
    worst = max(differences, key=lambda difference: difference.worst)
    wrong = [difference for difference in differences if not difference.worst < BOUND]
    if not wrong and uncut:
        axes = ", ".join(uncut)
        print(
            f"\nNOT PROVEN: there is one rank along {axes}, so nothing was cut or sharded; change --nproc or the sizes"
        )
        return 1
    if not wrong:
        print(f"\nequal within {BOUND:g}: the largest difference is {worst.worst:.1e}, in {worst.what}")
        return 0
    parameters = [difference.what for difference in wrong if difference not in differences[:2]]
    first = f"; the first parameter in forward's order is {parameters[0]}" if parameters else ""
    print(f"\nDIFFERENT: {len(wrong)} of {len(differences)} differ by more than {BOUND:g}{first}")
    return 1

"""`femto verify`: a run's own configuration on several processes against the same on one, parameter by parameter.

Both train a few steps in float64 on the CPU. What merely lays a run out (axes, schedule, sharding, precision, wrapped
or rewritten layers) must not change a number, so plugins with such hooks are left out on the one process; those that
decide what is computed (data, model, loss, optimizer) take part in both. Those that only look on take part in neither.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from femto_core.config import Config, config_class
from femto_core.errors import UserError
from femto_core.hooks import Hooks
from femto_core.plugins import BUILT_IN, PluginInfo, Plugins, activate
from femto_report.trial import take_number, trial_of

BOUND = 1e-9
"""Largest relative difference, each tensor's against its largest element: float64 leaves six digits to spare."""
LAYOUT = {
    "femto_mesh_axes",
    "femto_parallelize",
    "femto_wrap_layer",
    "femto_schedule",
    "femto_precision",
    "femto_sharding",
    "femto_grad_sync",
}
"""Hooks of plugins that lay a run out."""
CONTENT = {
    "femto_dataset",
    "femto_collator",
    "femto_model",
    "femto_transform_model",
    "femto_loss",
    "femto_optimizer",
    "femto_lr_schedule",
}
"""Hooks of plugins that decide what is computed."""
USAGE = (
    "Compare a run on several processes with the same on one: [RUN.toml] --plugins NAMES [--nproc 2] [--steps 3] "
    "[--layers L] [--hidden H] [--section.key value ...]. --layers and --hidden shrink the model, which then starts "
    "from random weights. Exits with 1 where a number differs."
)


@attrs.frozen
class Difference:
    """How far two runs are apart in one quantity, relative to its largest value."""

    what: str
    gradient: float
    """Worst of all steps."""
    weight: float

    @property
    def worst(self) -> float:
        return max(self.gradient, self.weight)


def verify_command(words: Sequence[str]) -> int:
    """`femto verify [RUN.toml] --plugins NAMES [--nproc N] [--steps S] [--layers L] [--hidden H] [--section.key V]`."""
    from femto_core.cli import quiet_libraries, read_run

    rest = list(words)
    processes, steps = take_number(rest, "--nproc", 2), take_number(rest, "--steps", 3)
    layers, hidden = take_number(rest, "--layers", 0), take_number(rest, "--hidden", 0)
    if not processes or not steps:
        raise UserError("femto verify needs at least one process and one step")
    config, plugins = read_run("verify", rest, USAGE)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        values = values_of(config, steps)
        shrink(values, layers, hidden, Path(folder))
        return verify(values, plugins, processes)


def verify(values: dict[str, dict[str, Any]], plugins: Plugins, processes: int) -> int:
    """Train with `values` on `processes` and on one; print how far they are apart; return 1 where it is too far."""
    from femto_core.testing import WorkerPool, assemble
    from femto_core.workers import WorkerFailedError

    blocked = [f"no:{name}" for name in BUILT_IN if name not in {info.name for info in plugins.active}]
    own = [info for info in plugins.active if info.name not in BUILT_IN]
    layout = [info.name for info in own if LAYOUT & hooks_of(info)]
    content = [info.name for info in own if CONTENT & hooks_of(info) and info.name not in layout]
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
    print(f"plugins on both: {', '.join(content) or 'none'}; not on the one: {', '.join(layout) or 'none'}\n")
    try:
        mine = assemble(several)
    except AssertionError as error:
        print(f"DIFFERENT: {error}")
        return 1
    return print_differences(list(compare(assemble(one), mine)))


def hooks_of(info: PluginInfo) -> set[str]:
    return {*info.hooks, *info.seats}


def train(values: Mapping[str, Any], plugins: Sequence[str]) -> dict[str, Any]:
    """Train as a worker's job; return this rank's part of a `Record`, and its mesh in words."""
    from femto_core.testing import make_trainer, record_training

    trainer = make_trainer(values, plugins, {})
    return {"mesh": str(trainer.mesh), **record_training(trainer)}


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
    """Return `values` without the sections of plugins that are not among `plugins`."""
    known = {
        field.name for field in attrs.fields(config_class(dict(Hooks(activate(plugins).manager).config_section())))
    }
    return {section: entries for section, entries in values.items() if section in known}


def refusal_in(failure: str) -> str:
    """Return the sentence of the `UserError` that ended a worker, or nothing where that was a defect."""
    lines = [line for line in failure.splitlines() if line.startswith(f"{UserError.__module__}.{UserError.__name__}: ")]
    return lines[0].partition(": ")[2] if lines else ""


def compare(one: Any, several: Any) -> Iterator[Difference]:
    """Yield losses, norms, and each parameter, in the order of forward."""
    import torch

    from femto_core.testing import relative_difference as apart

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


def print_differences(differences: Sequence[Difference]) -> int:
    """Print the table and what is to be made of it; return 1 where a difference is larger than the bound."""
    width = max(len(difference.what) for difference in differences)
    print(f"{'relative difference':<{width}}  {'gradient':>9}  {'weight':>9}")
    for difference in differences:
        mark = "  <--" if not difference.worst < BOUND else ""
        print(f"{difference.what:<{width}}  {difference.gradient:>9.1e}  {difference.weight:>9.1e}{mark}")
    worst = max(differences, key=lambda difference: difference.worst)
    wrong = [difference for difference in differences if not difference.worst < BOUND]
    if not wrong:
        print(f"\nequal within {BOUND:g}: the largest difference is {worst.worst:.1e}, in {worst.what}")
        return 0
    parameters = [difference.what for difference in wrong if difference not in differences[:2]]
    first = f"; the first parameter in forward's order is {parameters[0]}" if parameters else ""
    print(f"\nDIFFERENT: {len(wrong)} of {len(differences)} differ by more than {BOUND:g}{first}")
    return 1

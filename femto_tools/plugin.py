"""The built-in tools plugin: commands that try a run out, the hook reference, and the text of `--help`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import attrs

from femto_core.hookspecs import hookimpl
from femto_core.plugins import list_plugins

if TYPE_CHECKING:
    from femto_core.commands import CommandRegistry


@attrs.frozen
class HooksOptions:
    """Print the hook reference as Markdown."""


@attrs.frozen
class PluginsOptions:
    """List the installed plugins, and which are active: those named by --plugins or FEMTO_PLUGINS."""

    json: bool = False
    """Print JSON."""


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    from femto_tools.helptext import command_help
    from femto_tools.memory import MemoryOptions, memory_command
    from femto_tools.verify import VerifyOptions, verify_command

    memory = "count a run's peak memory by phase, for any number of ranks"
    verify = "compare a run on several processes with the same on one, number by number"
    registry.help_text = command_help
    registry.add(
        "plugins", "list installed and active plugins", PluginsOptions, partial(show_plugins, registry.plugins)
    )
    registry.add("hooks", "print the hook reference", HooksOptions, show_hooks)
    registry.add("memory", memory, MemoryOptions, memory_command, takes_run=True)
    registry.add("verify", verify, VerifyOptions, verify_command, takes_run=True)


def show_hooks(options: HooksOptions) -> int:
    """Print the hook reference."""
    from femto_tools.hookdoc import render

    print(render(), end="")
    return 0


def show_plugins(names: Sequence[str], options: PluginsOptions) -> int:
    """Print all installed plugins; `names` are the active ones."""
    infos = list_plugins(names)
    if options.json:
        print(json.dumps([attrs.asdict(info) for info in infos], indent=2))
        return 0
    width = max(len(info.name) for info in infos)
    for info in infos:
        state = "active" if info.active else "-"
        seats = [f"seat {hook.removeprefix('femto_')}" for hook in info.seats]
        does = ", ".join([*seats, *(f"around {hook.removeprefix('femto_')}" for hook in info.wraps)])
        observes = ", ".join(h.removeprefix("femto_") for h in info.hooks)
        what = "; ".join(filter(None, (does, observes))) or info.problem
        print(f"{info.name:<{width}}  {info.distribution} {info.version}  {state:<6}  {what}")
    return 0

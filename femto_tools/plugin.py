"""The built-in tools plugin: commands that try a run out, the hook reference, and the text of `--help`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.commands import CommandRegistry


@attrs.frozen
class HooksOptions:
    """Print the hook reference as Markdown."""


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    from femto_tools.helptext import command_help
    from femto_tools.memory import MemoryOptions, memory_command
    from femto_tools.verify import VerifyOptions, verify_command

    memory = "count a run's peak memory by phase, for any number of ranks"
    verify = "compare a run on several processes with the same on one, number by number"
    registry.help_text = command_help
    registry.add("hooks", "print the hook reference", HooksOptions, show_hooks)
    registry.add("memory", memory, MemoryOptions, memory_command, takes_run=True)
    registry.add("verify", verify, VerifyOptions, verify_command, takes_run=True)


def show_hooks(options: HooksOptions) -> int:
    """Print the hook reference."""
    from femto_tools.hookdoc import render

    print(render(), end="")
    return 0

"""The built-in tools plugin: commands about runs and plugins, rather than runs."""

from __future__ import annotations

from collections.abc import Sequence

from femto_core.cli import CommandRegistry
from femto_core.errors import UserError
from femto_core.hookspecs import hookimpl


@hookimpl
def femto_commands(registry: CommandRegistry) -> None:
    named = ["--plugins", ",".join(registry.plugins)] if registry.plugins else []

    def memory(words: Sequence[str]) -> int:
        from femto_report.memory import memory_command

        return memory_command([*words, *named])

    def verify(words: Sequence[str]) -> int:
        from femto_report.verify import verify_command

        return verify_command([*words, *named])

    registry.add("hooks", "print the hook reference", show_hooks)
    registry.add("memory", "count a run's peak memory by phase, for any number of ranks", memory)
    registry.add("verify", "compare a run on several processes with the same on one, number by number", verify)


def show_hooks(words: Sequence[str]) -> int:
    """Print the hook reference."""
    if words:
        raise UserError(f"femto hooks takes no arguments, got {words[0]!r}")
    from femto_report.hookdoc import render

    print(render(), end="")
    return 0

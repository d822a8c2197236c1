"""Subcommands: a name, a class of options, a function; plugins add theirs through `femto_commands`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from femto_core.errors import UserError

if TYPE_CHECKING:
    from femto_core.config import Config

T = TypeVar("T")
Function = Callable[[T], int] | Callable[[T, Any, Any], int]


@attrs.frozen
class Command:
    """A subcommand; `CommandRegistry.add` says what its parts are."""

    name: str
    help: str
    options: type[Any]
    run: Callable[..., int]
    takes_run: bool


@attrs.define
class CommandRegistry:
    """All subcommands by name, and what `--help` prints."""

    manager: Any
    """pluggy's manager of the active plugins, for commands that call hooks."""
    plugins: Sequence[str]
    """Names given with --plugins; they are those of the active ones, except for `femto plugins`."""
    commands: dict[str, Command] = attrs.field(factory=dict)
    help_text: Callable[[Command, Config | None], str] = lambda command, _: f"femto {command.name}: {command.help}"
    """The help of a command. For `train` it also gets all settings, whose values are the defaults. A plugin sets it."""

    def add(self, name: str, help: str, options: type[T], run: Function[T], takes_run: bool = False) -> None:  # noqa: A002
        """Add a subcommand: `run(options)` returns the exit code.

        `options` is a frozen attrs class. `--help` prints its docstring, and for each field the string below the field.
        A field without a default is required. A field with `metadata={"positional": True}` is given without a flag.

        If the command `takes_run`, its arguments are those of `femto train` besides its own, and it is called as
        `run(options, config, plugins)` with the run's checked `config.Config` and its active `plugins.Plugins`.

        Raises `UserError` if the name is taken.
        """
        if name in self.commands:
            raise UserError(f"two plugins add a command called {name!r}")
        self.commands[name] = Command(name, help, options, run, takes_run)

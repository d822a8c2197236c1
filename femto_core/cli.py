"""The command line: which command, which plugins, which settings; and how a process ends.

Besides `mesh` this is the only file that reads the environment (RANK, FEMTO_PLUGINS, FEMTO_TRACE_HOOKS).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs

from femto_core.config import Config, config_class, make_config, parse_flags, read_toml
from femto_core.errors import UserError, suggest
from femto_core.hooks import Hooks
from femto_core.plugins import Plugins, activate, installed_plugins, list_plugins

PROGRAM = "femto"
HELP = ("-h", "--help")
ANOTHER_RANK_LEFT = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Socket Timeout",
    "Broken pipe",
)


@attrs.frozen
class Command:
    """A subcommand: `run` takes the words after its name and returns the exit code."""

    name: str
    help: str
    run: Callable[[Sequence[str]], int]


@attrs.define
class CommandRegistry:
    """The subcommands there are; plugins add theirs through `femto_commands`."""

    commands: dict[str, Command] = attrs.field(factory=dict)
    plugins: Sequence[str] = ()
    """The names given with --plugins, which is no longer among a command's words, or in its RUN.toml."""

    def add(self, name: str, help: str, run: Callable[[Sequence[str]], int]) -> None:  # noqa: A002 - argparse's word
        """Add a subcommand. Raises `UserError` where the name is taken."""
        if name in self.commands:
            raise UserError(f"two plugins add a command called {name!r}")
        self.commands[name] = Command(name, help, run)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process: 0 done, 2 the user can mend it, 1 a defect. Never hangs on the way out."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = run_command(words)
    except UserError as error:
        code = 2
        _report(f"{PROGRAM}: {error}", own=False)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # whoever read the output (head, less) has seen enough
        code = 141
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - every rank must end, whatever happened
        code = 1
        if any(sign in str(error) for sign in ANOTHER_RANK_LEFT):
            _report(f"{PROGRAM}: rank {_rank()} lost contact with another rank, whose own message says why", own=True)
        else:
            _report(f"[rank {_rank()}] {traceback.format_exc()}", own=True)
    sys.stdout.flush()
    sys.stderr.flush()
    # Once process groups exist, the interpreter's own way out can wait for ever for ranks that are gone, or abort.
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        if not code:
            atexit._run_exitfuncs()
        os._exit(code)
    raise SystemExit(code)


def run_command(words: Sequence[str]) -> int:
    """Find the command that `words` begin with (train where they name none) and run it."""
    registry = CommandRegistry()
    registry.add("train", "train a model (the default)", train)
    registry.add("plugins", "list installed plugins, and which are active", show_plugins)
    name = words[0] if words and not words[0].startswith("-") else ""
    if name in registry.commands:
        return registry.commands[name].run(words[1:])
    if not name and not any(word in HELP for word in words):
        return train(words)
    if name.endswith(".toml"):
        return train(words)
    plugin_names, rest = split_plugins(words)
    if not plugin_names and len(rest) > 1 and rest[1].endswith(".toml"):
        plugin_names = _toml_plugins(read_toml(Path(rest[1])), rest[1])
    registry.plugins = tuple(plugin_names)
    Hooks(activate(plugin_names).manager).commands(registry)
    if name in registry.commands:
        return registry.commands[name].run(rest[1:])
    if name:
        if owner := _owner_of_command(name):
            raise UserError(
                f"{name} is a command of plugin {owner}, which is not active: {PROGRAM} {name} --plugins {owner}"
            )
        hint, known = suggest(name, registry.commands), ", ".join(registry.commands)
        raise UserError(f"unknown command {name!r}{hint} (commands: {known}, or a RUN.toml)")
    for command in registry.commands.values():
        print(f"  {PROGRAM} {command.name:<12} {command.help}")
    print(f"\n{PROGRAM} train --help lists every setting; {PROGRAM} with no arguments trains a tiny Llama.")
    return 0


def train(words: Sequence[str]) -> int:
    """Train: `[RUN.toml] [--plugins NAMES] [--section.key value ...]`."""
    config, plugins = read_run("train", words, train.__doc__ or "")
    quiet_libraries()
    train_run(config, plugins)
    return 0


def read_run(command: str, words: Sequence[str], description: str) -> tuple[Config, Plugins]:
    """Return what `[RUN.toml] [--plugins NAMES] [--section.key value ...]` describes, checked by all active plugins.

    Prints help and exits where `words` ask for it.
    """
    plugin_names, rest = split_plugins(words)
    toml_path = rest.pop(0) if rest and not rest[0].startswith("-") else ""
    toml = read_toml(Path(toml_path)) if toml_path else {}
    names = plugin_names or _toml_plugins(toml, toml_path)
    plugins = activate(names, _tracer())
    hooks = Hooks(plugins.manager)
    cls, defaults = config_class(dict(hooks.config_section())), hooks.config_defaults()
    if any(word in HELP for word in rest):
        import tyro  # only for --help

        tyro.cli(
            cls,
            args=["--help"],
            default=make_config(cls, {}, {}, "", defaults),
            prog=f"{PROGRAM} {command}",
            description=description,
        )
    config = make_config(cls, {**toml, "plugins": names}, parse_flags(rest, cls), toml_path, defaults)
    hooks.validate(config)
    return config, plugins


def train_run(config: Config, plugins: Plugins) -> None:
    """Join the other ranks, build the trainer, train, and part in good order."""
    from femto_core.build import build_trainer  # torch takes a second to load: not before it is needed
    from femto_core.mesh import init_process_group, pick_device

    init_process_group(pick_device())
    trainer = build_trainer(config, plugins)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: setattr(trainer, "stop_requested", True))
    trainer.train()
    trainer.close()
    trainer.mesh.barrier()  # process groups end with the process: `main` sees that they are there


def show_plugins(words: Sequence[str]) -> int:
    """List plugins: `[--json] [--plugins NAMES]`."""
    names, rest = split_plugins(words)
    if unknown := [word for word in rest if word != "--json"]:
        raise UserError(f"unknown argument {unknown[0]!r}; {PROGRAM} plugins takes --json and --plugins NAMES")
    infos = list_plugins(names)
    if "--json" in rest:
        print(json.dumps([attrs.asdict(info) for info in infos], indent=2))
        return 0
    width = max(len(info.name) for info in infos)
    for info in infos:
        state = "active" if info.active else "-"
        does = ", ".join([f"seat {s.removeprefix('femto_')}" for s in info.seats])
        observes = ", ".join(h.removeprefix("femto_") for h in info.hooks)
        what = "; ".join(filter(None, (does, observes))) or info.problem
        print(f"{info.name:<{width}}  {info.distribution} {info.version}  {state:<6}  {what}")
    return 0


def split_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (plugin names, the other words): from --plugins where it is given, otherwise from FEMTO_PLUGINS."""
    names = os.environ.get("FEMTO_PLUGINS", "")
    rest = list(words)
    for position, word in enumerate(rest):
        flag, inline, value = word.partition("=")
        if flag == "--plugins":
            if not inline and position + 1 == len(rest):
                raise UserError("--plugins needs names, separated by commas")
            names = value if inline else rest[position + 1]
            del rest[position : position + (1 if inline else 2)]
            break
    return [name.strip() for name in names.split(",") if name.strip()], rest


def quiet_libraries() -> None:
    """Keep libraries' progress bars out of the output of a run."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _toml_plugins(toml: dict[str, Any], path: str) -> list[str]:
    names = toml.get("plugins", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"plugins = {names!r} ({path}): must be a list of names")
    return names


def _owner_of_command(name: str) -> str:
    """Return the plugin that is installed, but not active, and has a command of this name; "" if there is none."""
    for plugin in installed_plugins():
        registry = CommandRegistry()
        with contextlib.suppress(UserError):
            Hooks(activate([plugin]).manager).commands(registry)
        if name in registry.commands:
            return plugin
    return ""


def _tracer() -> Callable[[str], None] | None:
    if os.environ.get("FEMTO_TRACE_HOOKS", "0") in ("", "0"):
        return None
    return lambda line: print(f"[rank {_rank()}] hook {line}", file=sys.stderr, flush=True)


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _report(message: str, *, own: bool) -> None:
    """Print `message` once: what all ranks have to say, rank 0 says; what only this rank knows, it says itself."""
    if not own and _rank():
        time.sleep(2)  # rank 0 has ended the run by now if it had the same to say
        message = f"[rank {_rank()}] {message}"
    print(message, file=sys.stderr, flush=True)

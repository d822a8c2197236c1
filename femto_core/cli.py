"""The command line: which command runs, with which plugins and settings, and how the process ends.

Besides `mesh` this is the only file that reads the environment (RANK, FEMTO_PLUGINS, FEMTO_TRACE_HOOKS).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import attrs

from femto_core import hookspecs
from femto_core.commands import CommandRegistry
from femto_core.config import Config, config_class, make_config, setting_kinds
from femto_core.errors import UserError, suggest
from femto_core.flags import make_options, read_flags
from femto_core.hooks import Hooks
from femto_core.plugins import Plugins, activate, installed_plugins
from femto_core.sections import not_negative
from femto_core.toml_file import read_toml
from femto_ops.reporting import report
from femto_ops.stopping import StopRequests
from femto_ops.streams import failed_output, flush_output, prepare_process

PROGRAM = "femto"
HELP = ("-h", "--help")
ANOTHER_RANK_LEFT = (
    *("gloo/transport", "closed by peer", "reset by peer", "Socket Timeout", "Broken pipe"),
    *("DistBackendError", "DistNetworkError", "DistStoreError"),
)


@attrs.frozen
class TrainOptions:
    """Train a model. Without arguments: a tiny Llama, on the sources of the Python standard library."""

    nproc: int = attrs.field(default=0, validator=not_negative)
    """Processes to start on this machine, as torchrun would; 0: those of run.nproc."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process: exit code 0 if it is done, 2 for a `UserError`, 1 for a defect."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if problem := prepare_process():
            raise UserError(problem)
        code = run_command(words)
    except UserError as error:
        code = 2
        report(f"{PROGRAM}: {error}", os.environ)
    except KeyboardInterrupt:
        code = 130
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a launcher passes on what a terminal has sent to all processes
        report(f"{PROGRAM}: interrupted", os.environ)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - every rank must end, whatever happened
        code = failed_output(error)
        if not code and any(sign in repr(error) for sign in ANOTHER_RANK_LEFT):
            rank = os.environ.get("RANK", "0")
            print(f"{PROGRAM}: rank {rank} lost contact with another rank, which says why", file=sys.stderr, flush=True)
        elif not code:
            report(traceback.format_exc(), os.environ)
        code = code or 1
    code = code or flush_output()
    # If process groups exist, the interpreter's own exit may abort, or wait for ever for ranks that are gone.
    if "torch.distributed" in sys.modules and sys.modules["torch.distributed"].is_initialized():
        if not code:
            atexit._run_exitfuncs()
        os._exit(code)
    raise SystemExit(code)


def run_command(words: Sequence[str]) -> int:
    """Run the command that `words` begin with, or `train` if they do not begin with a name. Return its exit code."""
    names, rest = split_plugins(words)
    named = bool(rest) and not rest[0].startswith("-") and not rest[0].endswith(".toml")
    name = rest.pop(0) if named else "train"
    if not named and "--version" in rest:
        print(f"femto-core {metadata.version('femto-core')}")
        return 0
    has_toml = bool(rest) and (rest[0].endswith(".toml") or (name == "train" and not rest[0].startswith("-")))
    toml = read_toml(Path(rest[0])) if has_toml else {}
    names = names or (_toml_plugins(toml, rest[0]) if has_toml else [])
    plugins = activate([] if name == "plugins" else names, _tracer())  # a plugin that cannot be activated is listed
    hooks, registry = Hooks(plugins.manager), CommandRegistry(plugins.manager, names)
    registry.add("train", "train a model (the default)", TrainOptions, partial(train, words), takes_run=True)
    wants_help = any(word in HELP for word in rest)
    wants_overview = wants_help and not named and not has_toml
    if wants_help or name != "train":
        hooks.call(hookspecs.femto_commands, registry=registry)
    if wants_overview:
        for command in registry.commands.values():
            print(f"  {PROGRAM} {command.name:<12} {command.help}")
        print(f"\n{PROGRAM} COMMAND --help lists its options; {PROGRAM} with no arguments trains a tiny Llama.")
        return 0
    command = registry.commands.get(name) or _refuse(name, registry)
    toml_path = rest.pop(0) if has_toml and command.takes_run else ""
    cls, defaults = config_class(hooks.config_sections()), hooks.config_defaults()
    if wants_help:
        print(registry.help_text(command, make_config(cls, {}, {}, "", defaults) if name == "train" else None))
        return 0
    flags = read_flags(command, rest, setting_kinds(cls) if command.takes_run else {})
    options = make_options(command, flags.pop("", {}))
    if not command.takes_run:
        return command.run(options)
    config = make_config(cls, {**toml, "plugins": names}, flags, toml_path, defaults)
    hooks.call(hookspecs.femto_validate, config=config)
    return command.run(options, config, plugins)


def train(words: Sequence[str], options: TrainOptions, config: Config, plugins: Plugins) -> int:
    """Train the run that `config` describes, in this process or in as many as it asks for, started with `words`."""
    here, nproc = os.environ.get("LOCAL_WORLD_SIZE"), options.nproc or config.run.nproc
    if here is None and nproc > 1:
        from femto_ops.ranks import run_ranks

        code, reason = run_ranks(nproc, ["-m", "femto_core", *words])
        if reason:
            report(f"{PROGRAM}: {reason}", os.environ)
        return code
    if here is not None and options.nproc and here != str(options.nproc):
        raise UserError(f"--nproc {options.nproc}: torchrun has started {here} processes here; leave --nproc out")
    quiet_libraries()
    train_run(config, plugins)
    return 0


def train_run(config: Config, plugins: Plugins) -> None:
    """Join the other ranks, build the trainer, train, and close it."""
    from femto_core.build import build_trainer  # torch takes a second to load
    from femto_core.launch import init_process_group, is_launched, pick_device

    with StopRequests(launched=is_launched()) as requests:
        init_process_group(pick_device(), config.train.timeout)
        trainer = build_trainer(config, plugins)
        requests.pass_to(trainer.request_stop, is_over=lambda: trainer.finished)
        trainer.train()
        trainer.close()
        trainer.mesh.barrier()  # `main` ends the process groups with the process


def split_plugins(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the plugin names and the other words. If there is no --plugins, FEMTO_PLUGINS has the names."""
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
    """Turn off the progress bars of transformers."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _toml_plugins(toml: dict[str, Any], path: str) -> list[str]:
    names = toml.get("plugins", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"plugins = {names!r} ({path}): must be a list of names")
    return names


def _refuse(name: str, registry: CommandRegistry) -> NoReturn:
    """Refuse a command that no active plugin has; name the installed plugin that has it, if there is one."""
    for plugin in installed_plugins():
        other: dict[str, Any] = {}
        with contextlib.suppress(UserError):
            manager = activate([plugin]).manager
            Hooks(manager).call(hookspecs.femto_commands, registry=CommandRegistry(manager, [plugin], other))
        if name in other:
            raise UserError(
                f"{name} is a command of plugin {plugin}, which is not active: {PROGRAM} {name} --plugins {plugin}"
            )
    hint, known = suggest(name, registry.commands), ", ".join(registry.commands)
    raise UserError(f"unknown command {name!r}{hint} (commands: {known}, or a RUN.toml)")


def _tracer() -> Callable[[str], None] | None:
    if os.environ.get("FEMTO_TRACE_HOOKS", "0") in ("", "0"):
        return None
    return lambda line: print(f"[rank {os.environ.get('RANK', 0)}] hook {line}", file=sys.stderr, flush=True)

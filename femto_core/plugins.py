"""Plugins: discovery, activation, and whether they fit together, all before any process group exists.

Installing is not activating: only names asked for are loaded. The kernel's own parts are plugins too (`BUILT_IN`),
registered first, so that pluggy calls them last.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import Distribution, EntryPoint, distribution, entry_points, metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import pluggy
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from femto_core import hookspecs
from femto_core.errors import UserError, suggest

GROUP = "femto.plugins"
BUILT_IN = {
    "defaults": "femto_core.defaults",
    "data": "femto_data.plugin",
    "checkpoint": "femto_checkpoint.plugin",
    "logs": "femto_report.logs:Logs",
    "sanity": "femto_report.sanity:SanityReport",
    "samples": "femto_report.samples:Samples",
    "recorder": "femto_report.recorder:Recorder",
    "progress": "femto_report.progress:ProgressReport",
    "profiler": "femto_report.profiler:Profiler",
    "tools": "femto_tools.plugin",
}


@attrs.frozen(kw_only=True)
class PluginInfo:
    """One plugin, as `femto plugins` lists it."""

    name: str
    distribution: str
    version: str
    active: bool
    seats: tuple[str, ...]
    wraps: tuple[str, ...]
    """Seats of others that the plugin wraps, which claims nothing."""
    hooks: tuple[str, ...]
    problem: str = ""

    @property
    def roles(self) -> set[str]:
        """The roles of all hooks that the plugin implements."""
        return {hook_role(hook) for hook in (*self.seats, *self.wraps, *self.hooks)}


@attrs.frozen(kw_only=True)
class Plugins:
    """The active plugins, checked against the hook specification and against each other."""

    manager: pluggy.PluginManager
    active: tuple[PluginInfo, ...]

    @property
    def versions(self) -> dict[str, str]:
        """Name -> distribution and version of each active plugin that is not built in; equal on all ranks."""
        return {p.name: f"{p.distribution} {p.version}" for p in self.active if p.name not in BUILT_IN}

    def answer_first(self, name: str, plugin: object) -> None:
        """Let `plugin` answer the seats that it implements before the plugins that take them.

        For commands that try a run out on other data. Raises `UserError` where its hooks do not fit.
        """
        _register(self.manager, name, plugin)


def hook_names() -> list[str]:
    """Return the names of all hooks, in the order of the specification."""
    return [name for name in vars(hookspecs) if name.startswith("femto_")]


def is_seat(hook: str) -> bool:
    """Tell whether `hook` is a seat, which exactly one plugin may take."""
    options: dict[str, Any] = getattr(hookspecs, hook).femto_spec
    return bool(options["firstresult"])


def hook_role(hook: str) -> str:
    """Return what implementing `hook` makes of a plugin: "setup", "layout", "content" or "observe"."""
    return str(getattr(hookspecs, hook).femto_role)


def activate(
    names: Sequence[str],
    trace: Callable[[str], None] | None = None,
    objects: Mapping[str, object] = MappingProxyType({}),
) -> Plugins:
    """Load and check the plugins `names` ("tp", "no:progress", ...); `trace` receives a line for each hook call.

    `objects` are further plugins that need no installing, such as a test's or a notebook's.

    Raises `UserError` where a plugin is not installed, does not import, needs another femto-core, implements an unknown
    hook, or takes a seat that another plugin takes.
    """
    blocked = {name[3:] for name in names if name.startswith("no:")}
    wanted = [name for name in names if not name.startswith("no:")]
    if twice := sorted({name for name in names if names.count(name) > 1} | blocked.intersection(wanted)):
        raise UserError(f"--plugins names {twice[0]} {'and no:' + twice[0] if twice[0] in blocked else 'twice'}")
    installed = installed_plugins()
    manager = _manager()
    if unknown := sorted(blocked - {*BUILT_IN, *installed, *wanted}):
        raise UserError(
            f"no:{unknown[0]} blocks a plugin that does not exist{suggest(unknown[0], {*BUILT_IN, *installed})}"
        )

    core = distribution("femto-core")
    chosen = [(name, core, _built_in(name)) for name in BUILT_IN if name not in blocked]
    for name in wanted:
        if name not in {*BUILT_IN, *installed}:
            raise UserError(_not_installed(name, installed))
        if name not in BUILT_IN:
            chosen.append((name, _dist(installed[name]), load(installed[name])))
    chosen += [(name, core, plugin) for name, plugin in objects.items()]
    active = []
    for name, dist, plugin in chosen:
        _register(manager, name, plugin)
        active.append(_info(name, dist, plugin, is_active=True))
    _check_seats(active)
    if trace is not None:
        _trace(manager, trace)
    return Plugins(manager=manager, active=tuple(active))


def installed_plugins() -> dict[str, EntryPoint]:
    """Return name -> entry point of every installed plugin. Raises `UserError` where two packages claim one name."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in BUILT_IN:
            raise UserError(
                f"{_label(_dist(entry))} provides a plugin named {entry.name!r}, which is the name of a built-in one; "
                f"uninstall {_dist(entry).name}"
            )
        other = found.get(entry.name)
        if other is not None and (other.value, _dist(other).name) != (entry.value, _dist(entry).name):
            raise UserError(
                f"two packages provide a plugin named {entry.name!r}: {_label(_dist(other))} and "
                f"{_label(_dist(entry))}; uninstall one of them"
            )
        found[entry.name] = entry
    return dict(sorted(found.items()))


def load(entry: EntryPoint) -> object:
    """Import one plugin: a module, an object, or a class or factory, which is called without arguments.

    Raises `UserError` with the plugin's own part of the traceback, or with the versions that do not fit.
    """
    dist = _dist(entry)
    core = distribution("femto-core").version
    for line in dist.requires or ():
        need = Requirement(line)
        applies = need.marker is None or need.marker.evaluate({"extra": ""})
        is_core = canonicalize_name(need.name) == "femto-core"
        if is_core and applies and not need.specifier.contains(core, prereleases=True):
            raise UserError(
                f"plugin {entry.name!r} ({_label(dist)}) needs femto-core{need.specifier}, but femto-core {core} is "
                "installed; upgrade one of the two"
            )
    try:
        return _instance(entry.load())
    except Exception as error:  # noqa: BLE001 - whatever the plugin's own code raises
        frames = traceback.extract_tb(error.__traceback__)
        others = {Path(__file__).parent, Path(importlib.__file__).parent, Path(importlib.metadata.__file__).parent}
        own = [f for f in frames if Path(f.filename).parent not in others and not f.filename.startswith("<frozen")]
        where = "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()
        raise UserError(f"plugin {entry.name!r} ({_label(dist)}) fails to import:\n{where}") from None


def list_plugins(active_names: Iterable[str]) -> list[PluginInfo]:
    """Return every installed plugin, built-in ones first; `problem` says why a plugin cannot be activated.

    Raises `UserError` where one of `active_names` is not installed.
    """
    names = set(active_names)
    core, installed = distribution("femto-core"), installed_plugins()
    if absent := sorted({name for name in names if not name.startswith("no:")} - {*BUILT_IN, *installed}):
        raise UserError(_not_installed(absent[0], installed))
    infos = [_info(name, core, _built_in(name), is_active=f"no:{name}" not in names) for name in BUILT_IN]
    for name, entry in installed.items():
        try:
            plugin = load(entry)
            _register(_manager(), name, plugin)
            infos.append(_info(name, _dist(entry), plugin, is_active=name in names and f"no:{name}" not in names))
        except UserError as error:
            infos.append(attrs.evolve(_info(name, _dist(entry), None, is_active=False), problem=str(error)))
    return infos


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager("femto")
    manager.add_hookspecs(hookspecs)
    return manager


def _built_in(name: str) -> object:
    module, _, attribute = BUILT_IN[name].partition(":")
    loaded = importlib.import_module(module)
    return _instance(getattr(loaded, attribute)) if attribute else loaded


def _instance(plugin: Any) -> object:
    return plugin() if callable(plugin) and not inspect.ismodule(plugin) else plugin


def _register(manager: pluggy.PluginManager, name: str, plugin: object) -> None:
    """Register after checking names ourselves, because pluggy would not name the nearest hook."""
    known = hook_names()
    for attribute in dir(plugin):
        implements = getattr(getattr(plugin, attribute, None), "femto_impl", None) is not None
        if implements and attribute not in known:
            raise UserError(f"plugin {name!r} implements {attribute}, which is not a hook{suggest(attribute, known)}")
        if attribute in known and not implements and callable(getattr(plugin, attribute)):
            raise UserError(f"plugin {name!r} has a {attribute} without @hookimpl, so it would never be called")
    if type(plugin).__hash__ is None:
        raise UserError(f"plugin {name!r} cannot be hashed, as pluggy must: write @attrs.define(eq=False)")
    if any(plugin is other for other in manager.get_plugins()):
        twin = manager.get_name(plugin)
        raise UserError(f"plugins {twin!r} and {name!r} are the same object, so name only one of them in --plugins")
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        reason = str(error).replace("\n", " ")
        raise UserError(f"plugin {name!r} does not fit the hook specification: {reason}") from None


def _info(name: str, dist: Distribution, plugin: object, *, is_active: bool) -> PluginInfo:
    marks = {hook: getattr(getattr(plugin, hook, None), "femto_impl", None) for hook in hook_names()}
    options: dict[str, Any] = {hook: mark for hook, mark in marks.items() if mark is not None}
    hooks = list(options)
    wrappers = [hook for hook in hooks if is_seat(hook) and (options[hook]["wrapper"] or options[hook]["hookwrapper"])]
    return PluginInfo(
        name=name,
        distribution=dist.name,
        version=dist.version,
        active=is_active,
        seats=tuple(hook for hook in hooks if is_seat(hook) and hook not in wrappers),
        wraps=tuple(wrappers),
        hooks=tuple(hook for hook in hooks if not is_seat(hook)),
    )


def _check_seats(active: Sequence[PluginInfo]) -> None:
    holders: dict[str, PluginInfo] = {}
    for plugin in active:
        if plugin.name in BUILT_IN:
            continue
        for seat in plugin.seats:
            if seat in holders:
                other = holders[seat]
                raise UserError(
                    f"{other.name!r} ({other.distribution} {other.version}) and {plugin.name!r} ({plugin.distribution} "
                    f"{plugin.version}) both take the seat {seat}, which has room for one; remove {other.name!r} or "
                    f"{plugin.name!r} from --plugins"
                )
            holders[seat] = plugin


def _trace(manager: pluggy.PluginManager, write: Callable[[str], None]) -> None:
    def before(hook: str, implementations: Sequence[pluggy.HookImpl], arguments: Any) -> None:
        called = ", ".join(i.plugin_name for i in reversed(implementations)) or "nobody"
        write(f"{hook}({', '.join(arguments)}) -> {called}")

    manager.add_hookcall_monitoring(before, lambda *_: None)


def _not_installed(name: str, installed: Iterable[str]) -> str:
    extras = metadata("femto-core").get_all("Provides-Extra") or []
    hint = f"pip install 'femto-core[{name}]'" if name in extras else "pip install the package that provides it"
    known = [*BUILT_IN, *installed]
    return f"plugin {name!r} is not installed{suggest(name, known)}; installed: {', '.join(known)}; to add it: {hint}"


def _dist(entry: EntryPoint) -> Distribution:
    assert entry.dist is not None, "entry points found by group always know their distribution"
    return entry.dist


def _label(dist: Distribution) -> str:
    return f"{dist.name} {dist.version}"

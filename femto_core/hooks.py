"""Calls hooks with the types of their specification, so that the rest of the kernel never touches pluggy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import attrs
import pluggy

from femto_core import hookspecs
from femto_core.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


@attrs.frozen
class Hooks:
    """The hooks of the active plugins. A hook is named by its specification: `hooks.seat(hookspecs.femto_model, ...)`.

    Arguments are given by name.
    """

    manager: pluggy.PluginManager

    def seat(self, spec: Callable[P, T | None], *_: P.args, **arguments: P.kwargs) -> T:
        """Return the strategy of the plugin that takes a seat. Raises `UserError` where nobody does."""
        strategy: T | None = self._caller(spec)(**arguments)
        if strategy is None:
            raise UserError(
                f"nobody takes the seat {spec.__name__}: the built-in default is blocked, and no active plugin has it"
            )
        return strategy

    def collect(self, spec: Callable[P, T | None], *_: P.args, **arguments: P.kwargs) -> list[T]:
        """Call a collecting hook on all plugins; return all results but None, the last named plugin's first."""
        results: list[T] = self._caller(spec)(**arguments)
        return results

    def call(self, spec: Callable[P, None], *_: P.args, **arguments: P.kwargs) -> None:
        """Call a collecting hook that returns nothing on all plugins."""
        self._caller(spec)(**arguments)

    def config_sections(self) -> dict[str, type[Any]]:
        """Return every plugin's section by name. Raises `UserError` where two plugins bring one of the same name."""
        sections = self.collect(hookspecs.femto_config_section)
        first = dict(reversed(sections))
        for name, cls in sections:
            if cls is not first[name]:
                raise UserError(
                    f"two active plugins bring a config section [{name}]: {cls.__module__} and "
                    f"{first[name].__module__}; remove one of them from --plugins"
                )
        return first

    def config_defaults(self) -> list[Mapping[str, Any]]:
        """Return every plugin's defaults; later ones win."""
        return list(reversed(self.collect(hookspecs.femto_config_defaults)))

    def layer_wrappers(self) -> list[Callable[..., Any]]:
        """Return each plugin's `femto_wrap_layer`, in the order in which they wrap: the last named plugin's first."""
        implementations = self.manager.hook.femto_wrap_layer.get_hookimpls()
        plugins = self.manager.get_plugins()
        return [
            self.manager.subset_hook_caller("femto_wrap_layer", plugins - {implementation.plugin})
            for implementation in reversed(implementations)
        ]

    def _caller(self, spec: Callable[..., Any]) -> Any:
        return getattr(self.manager.hook, spec.__name__)

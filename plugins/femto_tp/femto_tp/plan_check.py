"""Refuses a plan that would compute something else: kinds that do not fit their layers, and patterns without a use.

The full model is looked at, before it is cut into stages, and however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from femto_core.errors import UserError, suggest
from femto_ops.flops import head_dim
from femto_tp.kinds import KINDS, ColumnKind, HeadNormKind, NormKind, ParallelKind, RowKind
from femto_tp.parallelize import compile_pattern, kinds_of, modules_with_parameters

FUSED = "several layers fused into one need a kind of their own (femto-tp's @parallel_kind)"


def check_plan(model: Any, changes: Mapping[str, str]) -> None:
    """Raise `UserError` where `changes`, on top of the plan of the model's family, do not fit `model`.

    `model` is transformers' ...ForCausalLM, on any device.
    """
    modules = dict(modules_with_parameters(model))
    for pattern, kind in changes.items():
        if kind not in KINDS:
            raise UserError(
                f"tp.plan: {pattern} = {kind!r} is not a parallel kind{suggest(kind, KINDS)} "
                f"(kinds: {', '.join(KINDS)})"
            )
        if not any(compile_pattern(pattern).fullmatch(name) for name in modules):
            raise UserError(
                f"tp.plan: {pattern} matches no module with parameters{suggest(pattern, modules)}; * stands for one "
                "part of a name, between two dots"
            )
    plan = {name: KINDS[chosen] for name, chosen in kinds_of(model, changes).items() if chosen}
    families: dict[str, dict[str, ParallelKind]] = {}
    for name, parallel in plan.items():
        families.setdefault(name.rpartition(".")[0], {})[name] = parallel
    for siblings in families.values():
        for name, parallel in siblings.items():
            _check_module(name, modules, parallel, siblings, model.config)


def _check_module(
    name: str, modules: Mapping[str, nn.Module], kind: ParallelKind, siblings: Mapping[str, ParallelKind], config: Any
) -> None:
    module, width = modules[name], head_dim(config)
    heads = {"q": config.num_attention_heads, "kv": getattr(config, "num_key_value_heads", 0)}
    what = f"tp.plan: {name} ({type(module).__name__})"
    if isinstance(kind, ColumnKind | RowKind) and isinstance(module, nn.Linear):
        side, found = (
            ("outputs", module.out_features) if isinstance(kind, ColumnKind) else ("inputs", module.in_features)
        )
        if kind.by and found != heads[kind.by] * width:
            which = {"q": "query", "kv": "key/value"}[kind.by]
            raise UserError(
                f"{what} has {found} {side}, and not the {heads[kind.by]} {which} heads of {width} by which its kind "
                f"cuts them; {FUSED}"
            )
        if isinstance(kind, ColumnKind) and not kind.by:
            _check_partners(what, found, modules, siblings)
    if isinstance(kind, HeadNormKind) and any(parameter.shape != (width,) for parameter in module.parameters()):
        raise UserError(f"{what} is no norm over single heads of {width}, as its kind 'head_norm' takes it to be")
    if isinstance(kind, NormKind) and any(isinstance(other, ColumnKind) and other.by for other in siblings.values()):
        raise UserError(f"{what} is beside projections that are cut by heads, and sees only some: it is no 'norm'")


def _check_partners(
    what: str, outputs: int, modules: Mapping[str, nn.Module], siblings: Mapping[str, ParallelKind]
) -> None:
    """Refuse a column layer if the row layers beside it take another number of inputs than it has outputs."""
    rows = {name: modules[name] for name, kind in siblings.items() if isinstance(kind, RowKind) and not kind.by}
    for name, row in rows.items():
        if isinstance(row, nn.Linear) and row.in_features != outputs:
            raise UserError(f"{what} has {outputs} outputs, but {name} takes {row.in_features} inputs; {FUSED}")

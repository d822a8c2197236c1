"""Rewrites a stage on the meta device: every module with parameters is replaced as the plan says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from femto_core.errors import UserError, suggest
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_tp.column import ColumnGroup, gather_for
from femto_tp.cuts import cut_heads
from femto_tp.kinds import KINDS, Context
from femto_tp.ranks import TP, Ranks
from femto_tp.sequence import Sequence

LLAMA = {
    "model.embed_tokens": "embedding",
    "model.layers.*.self_attn.q_proj": "column:q",
    "model.layers.*.self_attn.k_proj": "column:kv",
    "model.layers.*.self_attn.v_proj": "column:kv",
    "model.layers.*.self_attn.o_proj": "row:q",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "model.layers.*.input_layernorm": "norm",
    "model.layers.*.post_attention_layernorm": "norm",
    "model.norm": "norm",
    "lm_head": "head",
}
QWEN3 = {**LLAMA, "model.layers.*.self_attn.q_norm": "head_norm", "model.layers.*.self_attn.k_norm": "head_norm"}
PLANS = {"llama": LLAMA, "mistral": LLAMA, "qwen2": LLAMA, "qwen3": QWEN3}
"""For each of transformers' model types, the kind of each module that has parameters, by pattern of its name."""


def parallelize(stage: Stage, mesh: Mesh, *, sequence_parallel: bool, changes: Mapping[str, str]) -> None:
    """Cut the stage over the mesh's axis tp, in place. `changes` are added to the plan of the model's family.

    Raises `UserError` for a module that no pattern knows, a kind that does not exist or has no place for one of the
    module's parameters, and heads that cannot be cut.
    """
    ranks = Ranks.of(mesh)
    heads = cut_heads(stage.config, ranks.size)
    runs = [line[at : at + heads.copies] for line in mesh.lines(TP) for at in range(0, ranks.size, heads.copies)]
    copies = mesh.new_groups(runs) if heads.copies > 1 else None
    sequence = Sequence(ranks) if sequence_parallel else None
    context = Context(
        mesh=mesh,
        ranks=ranks,
        heads=heads,
        copies=None if copies is None else Ranks(copies),
        later=stage.weight_grads,
        sequence=sequence,
    )
    plan = plan_for(stage, changes)
    cut: dict[int, nn.Parameter] = {}
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    for name, module in list(stage.module.named_modules()):
        if not any(parameter is not None for parameter in module._parameters.values()):
            continue
        kind = KINDS[plan[name]]
        parameters = {}
        for suffix, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in cut:  # a tied weight is cut once
                full = names[id(parameter)]
                layout = stage.layouts[full]
                shard = kind.loader(suffix, context).shard(tuple(parameter.shape), ranks.rank, ranks.size)
                stage.layouts[full] = attrs.evolve(
                    layout,
                    box=shard.box,
                    flat=(0, shard.box.numel),
                    partial=layout.partial | ({TP} if shard.partial else set()),
                    replicated=layout.replicated - ({TP} if shard.is_cut else set()),
                    primary=layout.primary and shard.first,
                )
                local = torch.empty(shard.box.sizes, dtype=parameter.dtype, device="meta")
                cut[id(parameter)] = nn.Parameter(local, parameter.requires_grad)
            parameters[suffix] = cut[id(parameter)]
        parent, _, own = name.rpartition(".")
        built = kind.build(name, module, parameters, context)
        kept = {id(parameter) for parameter in built.parameters()}
        if lost := [suffix for suffix, parameter in parameters.items() if id(parameter) not in kept]:
            raise UserError(
                f"tp's kind {plan[name]!r} has no place for the parameter {lost[0]} of {name} "
                f"({type(module).__name__}); name a kind that has in [tp.plan]"
            )
        setattr(stage.module.get_submodule(parent), own, built)
    count_local_heads(stage, context)
    if sequence is not None:
        cut_sequence(stage, sequence, context)


def plan_for(stage: Stage, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of every module of the stage that has parameters."""
    family = stage.config.model_type
    patterns = {**PLANS.get(family, {}), **changes}
    for pattern, kind in changes.items():
        if kind not in KINDS:
            raise UserError(
                f"tp.plan: {pattern} = {kind!r} is no parallel kind{suggest(kind, KINDS)} (kinds: {', '.join(KINDS)})"
            )
    compiled = [(re.compile(re.escape(p).replace(r"\*", "[^.]+")), kind) for p, kind in patterns.items()]
    plan: dict[str, str] = {}
    for name, module in stage.module.named_modules():
        if not any(parameter is not None for parameter in module._parameters.values()):
            continue
        found = [kind for pattern, kind in compiled if pattern.fullmatch(name)]
        if not found:
            raise UserError(
                f"tp does not know how to cut {name} ({type(module).__name__}) of a {family} model; say it in TOML: "
                f'[tp.plan] "{re.sub(r"[0-9]+", "*", name)}" = one of {", ".join(KINDS)}'
            )
        plan[name] = found[-1]
    return plan


def count_local_heads(stage: Stage, context: Context) -> None:
    """Tell each attention module how many heads it has here."""
    queries = len(context.heads.queries[context.ranks.rank])
    key_values = len(context.heads.key_values[context.ranks.rank])
    for module in stage.module.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = queries // key_values
            for attribute, count in (("num_heads", queries), ("num_key_value_heads", key_values)):
                if hasattr(module, attribute):
                    setattr(module, attribute, count)


def cut_sequence(stage: Stage, sequence: Sequence, context: Context) -> None:
    """Have the stage's layers see a part of the sequence each, and what is around them the whole.

    Attention masks and rotary angles are made for the whole sequence, before the first layer. Within a layer, attention
    and MLP see the whole one again.
    """
    layers = dict(stage.named_layers())

    def leave(partial: bool) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        return lambda _module, _inputs, output: sequence.gather(output, partial=partial)

    for number, chunk in enumerate(stage.chunks):
        inside = [layers[f"model.layers.{layer}"] for layer in chunk]
        # What follows the last chunk's norm is the head, whose input gradient is a partial sum on each rank.
        ends_with_norm = stage.has_head(number)
        if inside:
            change_input(inside[0], sequence.scatter)
            last: nn.Module = stage.body.norm if ends_with_norm else inside[-1]
            last.register_forward_hook(leave(ends_with_norm))
        elif ends_with_norm:
            change_input(stage.body.norm, sequence.scatter)
            stage.body.norm.register_forward_hook(leave(True))
    parents: dict[str, list[ColumnGroup]] = {}
    for key, group in context.groups.items():
        parents.setdefault(key.rpartition(".")[0], []).append(group)
    for parent, groups in parents.items():
        change_input(stage.module.get_submodule(parent), functools.partial(gather_for, groups, sequence))


def change_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Have `module` called with `change(hidden states)` in the place of its hidden states."""

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, {**named, "hidden_states": change(named["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)

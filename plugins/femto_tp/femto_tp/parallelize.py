"""Shards a stage on the meta device: every module with parameters is replaced as the plan says."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

from femto_core.errors import UserError
from femto_core.mesh import Mesh
from femto_core.model import Stage
from femto_tp.column import ColumnGroup, gather_for
from femto_tp.cuts import cut_heads
from femto_tp.kinds import KINDS, Context, ParamShard, ShardLoader
from femto_tp.ranks import TP, Ranks
from femto_tp.sequence import SequenceShards

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
"""Per transformers model type: the kind of each module that has parameters, by pattern of its name."""


def parallelize(stage: Stage, mesh: Mesh, *, sequence_parallel: bool, changes: Mapping[str, str]) -> None:
    """Shard the stage over the mesh's axis tp, in place. `changes` are added to the plan of the model's family.

    Raises `UserError` for a module that no pattern matches, a kind that drops one of the module's parameters, and heads
    that the ranks cannot divide.
    """
    context = make_context(stage, mesh, sequence_parallel)
    plan = plan_for(stage, changes)
    shards = LocalShards(stage, context)
    for name, module in list(modules_with_parameters(stage.module)):
        kind = KINDS[plan[name]]
        loaders = {suffix: kind.loader(suffix, context) for suffix in own_parameters(module)}
        parameters = {suffix: shards.of(p, loaders[suffix]) for suffix, p in own_parameters(module).items()}
        built = kind.build(name, module, parameters, context)
        check_parameters_are_kept(built, parameters, f"tp's kind {plan[name]!r}", f"{name} ({type(module).__name__})")
        parent, _, own = name.rpartition(".")
        setattr(stage.module.get_submodule(parent), own, built)
    count_local_heads(stage, context)
    if context.sequence is not None:
        cut_sequence(stage, context.sequence, context)


def make_context(stage: Stage, mesh: Mesh, sequence_parallel: bool) -> Context:
    """Divide the attention heads, and build the groups of ranks that hold the same key/value heads."""
    ranks = Ranks.of(mesh)
    heads = cut_heads(stage.config, ranks.size)
    count = heads.replicas
    runs = [line[at : at + count] for line in mesh.lines(TP) for at in range(0, ranks.size, count)]
    group = mesh.new_groups(runs) if count > 1 else None
    return Context(
        mesh=mesh,
        ranks=ranks,
        heads=heads,
        replicas=None if group is None else Ranks(group),
        weight_grads=stage.weight_grads,
        sequence=SequenceShards(ranks) if sequence_parallel else None,
    )


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of `module` itself, without those of its submodules."""
    return {suffix: parameter for suffix, parameter in module._parameters.items() if parameter is not None}


def modules_with_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and module of every module of `model` that has parameters of its own."""
    for name, module in model.named_modules():
        if own_parameters(module):
            yield name, module


class LocalShards:
    """This rank's shards of a stage's parameters. The stage's layouts are narrowed to them."""

    def __init__(self, stage: Stage, context: Context) -> None:
        self._layouts, self._ranks = stage.layouts, context.ranks
        self._names = {id(parameter): name for name, parameter in stage.named_parameters()}
        self._shards: dict[int, nn.Parameter] = {}

    def of(self, parameter: nn.Parameter, loader: ShardLoader) -> nn.Parameter:
        """Return this rank's shard of `parameter`; a tied weight has one shard, made by its first loader."""
        if id(parameter) not in self._shards:
            shard = loader.shard(tuple(parameter.shape), self._ranks.rank, self._ranks.size)
            self._narrow_layout(self._names[id(parameter)], shard)
            local = torch.empty(shard.box.sizes, dtype=parameter.dtype, device="meta")
            self._shards[id(parameter)] = nn.Parameter(local, parameter.requires_grad)
        return self._shards[id(parameter)]

    def _narrow_layout(self, name: str, shard: ParamShard) -> None:
        layout = self._layouts[name]
        self._layouts[name] = attrs.evolve(
            layout,
            box=shard.box,
            flat=(0, shard.box.numel),
            partial=layout.partial | ({TP} if shard.partial else set()),
            replicated=layout.replicated - ({TP} if shard.is_cut else set()),
            cut=layout.cut | ({TP} if shard.is_cut else set()),
            primary=layout.primary and shard.first,
        )


def check_parameters_are_kept(built: nn.Module, parameters: Mapping[str, nn.Parameter], kind: str, module: str) -> None:
    """Raise `UserError` if `built`, the result of a kind, lacks one of `parameters`."""
    kept = {id(parameter) for parameter in built.parameters()}
    if lost := [suffix for suffix, parameter in parameters.items() if id(parameter) not in kept]:
        raise UserError(f"{kind} drops the parameter {lost[0]} of {module}; name a kind that keeps it in [tp.plan]")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the expression of a plan's `pattern`, in which * stands for one part of a name."""
    return re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))


def kinds_of(model: Any, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the kind of each module of `model` that has parameters; empty where no pattern matches."""
    patterns = {**PLANS.get(model.config.model_type, {}), **changes}
    compiled = [(compile_pattern(pattern), kind) for pattern, kind in patterns.items()]
    plan = {}
    for name, _ in modules_with_parameters(model):
        plan[name] = next((kind for pattern, kind in reversed(compiled) if pattern.fullmatch(name)), "")
    return plan


def plan_for(stage: Stage, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the kind of every module of the stage that has parameters."""
    plan = kinds_of(stage.module, changes)
    for name, kind in plan.items():
        if not kind:
            raise UserError(
                f"tp does not know how to shard {name} ({type(stage.module.get_submodule(name)).__name__}) of a "
                f"{stage.config.model_type} model; say it in TOML: "
                f'[tp.plan] "{re.sub(r"[0-9]+", "*", name)}" = one of {", ".join(KINDS)}'
            )
    return plan


def count_local_heads(stage: Stage, context: Context) -> None:
    """Set each attention module's head counts to those of this rank."""
    queries = len(context.heads.queries[context.ranks.rank])
    key_values = len(context.heads.key_values[context.ranks.rank])
    for module in stage.module.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = queries // key_values
            for attribute, count in (("num_heads", queries), ("num_key_value_heads", key_values)):
                if hasattr(module, attribute):
                    setattr(module, attribute, count)


def cut_sequence(stage: Stage, sequence: SequenceShards, context: Context) -> None:
    """Shard the sequence before the stage's first layer, and unshard it after the last one.

    Attention masks and rotary angles are computed before the first layer, for the whole sequence. Within a layer,
    attention and MLP gather the whole sequence again.
    """
    layers = dict(stage.named_layers())

    def leave(partial: bool) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor]:
        return lambda _module, _inputs, output: sequence.gather(output, partial=partial)

    for number, chunk in enumerate(stage.chunks):
        inside = [layers[f"model.layers.{layer}"] for layer in chunk]
        # The head follows the norm, and its input gradient is a partial sum on each rank.
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
    """Replace the hidden states that `module` is called with by `change(hidden states)`."""

    def hook(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (change(inputs[0]), *inputs[1:]), named
        return inputs, {**named, "hidden_states": change(named["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)

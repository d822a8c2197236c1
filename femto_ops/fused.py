"""Replaces a Hugging Face model's norms and MLPs by equivalent modules that save fewer activations."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn

from femto_ops.functions import rms_norm, swiglu


class RMSNorm(nn.Module):
    """`functions.rms_norm` with its weight [h]; the parameter is the one passed in, not a copy."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class SwiGLUMLP(nn.Module):
    """down_proj(silu(gate_proj(x)) * up_proj(x)) with the projections passed in.

    The projections are called as modules, so a bias, an adapter or a tensor-parallel layer keeps working.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module, act_fn: nn.Module) -> None:
        super().__init__()
        self.gate_proj = gate_proj
        self.up_proj = up_proj
        self.down_proj = down_proj
        self.act_fn = act_fn  # never called; kept so that no module name disappears

    def forward(self, x: Tensor) -> Tensor:
        """[..., h] -> [..., h]."""
        y: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return y


def replace_with_fused(model: nn.Module) -> list[str]:
    """Replace RMS norms and SwiGLU MLPs of `model` in place by equivalent fused modules; return their names.

    Every candidate is tested first. A copy of it, with small random weights on the CPU, must agree with the replacement
    up to fp32 and bf16 rounding; so Gemma's norm (1 + weight) and an MLP with dropout are left alone. Parameters, their
    names, their order and the global random state do not change. The model may be on any device, meta included. Call
    this before modules are wrapped or parallelised.
    """
    chosen: dict[nn.Module, nn.Module] = {}
    names: list[str] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module is model:
            continue
        if module not in chosen:
            replacement = _as_rms_norm(module) or _as_swiglu_mlp(module)
            if replacement is None:
                continue
            chosen[module] = replacement.train(module.training)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, chosen[module])
        names.append(name)
    return names


def _as_rms_norm(module: nn.Module) -> RMSNorm | None:
    """Return the replacement of `module`, sharing its weight, or None if it is not a plain RMS norm."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or isinstance(module, RMSNorm) or not isinstance(eps, float):
        return None
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or _contents(module) != {"weight"}:
        return None
    if _hooked(module) or not _takes_one_tensor(module):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    h = weight.shape[0]
    probe_weight = nn.Parameter(torch.randn(h, generator=generator, device="cpu"), requires_grad=False)
    x = torch.randn(4, h, generator=generator, device="cpu")
    x *= torch.tensor([[1e-3], [0.1], [1.0], [30.0]], device="cpu")  # eps dominates some rows and not others
    probe = copy.deepcopy(module, {id(weight): probe_weight})
    return RMSNorm(weight, eps) if _agree(probe, RMSNorm(probe_weight, eps), x) else None


def _as_swiglu_mlp(module: nn.Module) -> SwiGLUMLP | None:
    """Return the replacement of `module`, sharing its projections, or None if it is not a plain SwiGLU MLP."""
    children = dict(module.named_children())
    if isinstance(module, SwiGLUMLP) or children.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return None
    if _contents(module) != children.keys() or _contents(children["act_fn"]):
        return None
    if _hooked(module) or _hooked(children["act_fn"]) or not _takes_one_tensor(module):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    h, i = 8, 12
    shapes = {"gate_proj": (h, i), "up_proj": (h, i), "down_proj": (i, h)}
    stand_ins = {name: _random_linear(*shape, generator) for name, shape in shapes.items()}
    probe = copy.deepcopy(module, {id(children[name]): stand_in for name, stand_in in stand_ins.items()})
    x = 3 * torch.randn(2, 3, h, generator=generator, device="cpu")
    if not _agree(probe, SwiGLUMLP(**stand_ins, act_fn=children["act_fn"]), x):
        return None
    return SwiGLUMLP(**children)


def _random_linear(d_in: int, d_out: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer with random weight and bias on the CPU in fp32, regardless of torch's defaults."""
    linear = nn.Linear(d_in, d_out, device="meta")
    linear.weight = nn.Parameter(torch.randn(d_out, d_in, generator=generator, device="cpu", dtype=torch.float32))
    linear.bias = nn.Parameter(torch.randn(d_out, generator=generator, device="cpu", dtype=torch.float32))
    return linear


def _contents(module: nn.Module) -> set[str]:
    """Return the names of the parameters, buffers and children of `module` itself."""
    return {*module._parameters, *module._buffers, *module._modules}


def _hooked(module: nn.Module) -> bool:
    """Return whether `module` has hooks, which a replacement would lose."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


@torch.no_grad()
def _agree(theirs: nn.Module, ours: nn.Module, x: Tensor) -> bool:
    """Return whether two modules agree on `x`, up to rounding, in fp32 and in bf16; both are cast in place."""
    return all(_close(theirs.to(dtype), ours.to(dtype), x.to(dtype)) for dtype in (torch.float32, torch.bfloat16))


def _close(theirs: nn.Module, ours: nn.Module, x: Tensor) -> bool:
    """Return whether outputs have the same shape and dtype, and differ by at most 8 eps of the largest value."""
    try:
        want, got = theirs(x), ours(x)
    except RuntimeError:  # a kernel that does not run on the CPU cannot be tested
        return False
    if not isinstance(want, Tensor) or want.shape != got.shape or want.dtype != got.dtype:
        return False
    return bool((want - got).abs().max() <= 8 * torch.finfo(x.dtype).eps * want.abs().max())


def _takes_one_tensor(module: nn.Module) -> bool:
    """Return whether forward has one argument; a replacement would lose others (a gate, a residual)."""
    return len(inspect.signature(module.forward).parameters) == 1

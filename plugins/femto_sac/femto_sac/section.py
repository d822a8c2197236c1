"""The config section of plugin sac."""

from __future__ import annotations

import attrs

from femto_core.sections import not_negative, positive


@attrs.frozen(kw_only=True)
class SACSection:
    """Activations that are computed again in backward instead of being saved."""

    policy: str = "full"
    """none, full, selective (keep matrix products and attention), modules (by sac.pattern), auto (to sac.budget_gib),
    or a policy that a plugin registers."""
    every: int = attrs.field(default=1, validator=positive)
    """Apply to every N-th layer only; for full and selective."""
    pattern: str = ""
    """For modules: the pattern of the names of modules to checkpoint, such as model.layers.*.mlp."""
    budget_gib: float = attrs.field(default=0.0, validator=not_negative)
    """For auto: GiB that the layers of this rank may save for backward."""

"""The settings of a dry run, for commands that try a run out and leave nothing behind."""

from __future__ import annotations

import attrs

from femto_core.config import Config


def trial_of(config: Config, folder: str) -> Config:
    """Return a run's settings for a try in `folder`, which resumes, saves and evaluates nothing."""
    return attrs.evolve(
        config,
        run=attrs.evolve(config.run, dir=folder, name="trial"),
        data=attrs.evolve(config.data, workers=0),
        eval=attrs.evolve(config.eval, every=0),
        checkpoint=attrs.evolve(config.checkpoint, every=0, resume="none", weights_only=False),
    )

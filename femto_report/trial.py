"""What the commands that try a run out have in common: its settings without what it would leave behind."""

from __future__ import annotations

import attrs

from femto_core.config import Config
from femto_core.errors import UserError


def trial_of(config: Config, folder: str) -> Config:
    """Return the settings of a run in `folder` that resumes, saves and evaluates nothing, and reads data itself."""
    return attrs.evolve(
        config,
        run=attrs.evolve(config.run, dir=folder, name="trial"),
        data=attrs.evolve(config.data, workers=0),
        eval=attrs.evolve(config.eval, every=0),
        checkpoint=attrs.evolve(config.checkpoint, every=0, resume="none", weights_only=False),
    )


def take_number(words: list[str], flag: str, default: int) -> int:
    """Remove `flag` and its value from `words` and return the value. Raises `UserError` where that is no number."""
    if flag not in words:
        return default
    at = words.index(flag)
    value = words[at + 1] if at + 1 < len(words) else ""
    if not value.isdecimal():
        raise UserError(f"{flag} needs a number, got {value!r}")
    del words[at : at + 2]
    return int(value)

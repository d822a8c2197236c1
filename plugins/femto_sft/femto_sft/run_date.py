"""The date that a run's chat template writes, kept in the run's folder: a run that goes on trains the same rows."""

from __future__ import annotations

import datetime
from pathlib import Path

from femto_core.config import Config
from femto_core.errors import UserError
from femto_data.atomic import write_atomic
from femto_sft.section import SFTSection, day_of

FILE = "sft_date.txt"


def run_date(config: Config) -> str:
    """Return sft.date, or the date of the run that this one goes on with, or today's.

    Raises `UserError` where the earlier run's record is damaged.
    """
    section, resume = config.section(SFTSection), config.checkpoint.resume
    if section.date or resume == "none" or config.checkpoint.weights_only:
        return str(day_of(section))
    folder = Path(config.run.dir) / config.run.name if resume == "auto" else Path(resume).parent.parent
    file = folder / FILE
    if not file.is_file():
        return str(day_of(section))
    try:
        return str(datetime.date.fromisoformat(file.read_text(encoding="utf-8").strip()))
    except (OSError, ValueError):
        raise UserError(f"{file} holds no date; remove it, and set sft.date to the day the run began") from None


def keep_date(folder: Path, date: str) -> None:
    """Write the run's date into its folder; without room for it, say so and go on."""
    try:
        write_atomic(folder / FILE, f"{date}\n")
    except OSError as error:
        print(
            f"sft      WARNING  {folder / FILE} cannot be written ({error.strerror}); a run that goes on with this one "
            f"needs --sft.date {date}",
            flush=True,
        )

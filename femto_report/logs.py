"""Each rank's own log: Python's logging and warnings of a run, and the traceback that ended it, in logs/rank-N.log.

What rank 0 warns of is on the screen too, as it would be without a log.
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class Logs:
    """Listens on the root logger while a run goes on."""

    def __init__(self) -> None:
        self._handler: logging.Handler = logging.NullHandler()
        self._screen: logging.Handler = logging.NullHandler()
        self._captures = False

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        folder = trainer.run_dir / "logs"
        folder.mkdir(parents=True, exist_ok=True)  # rank 0 made the run's on its own machine
        self._handler = logging.FileHandler(folder / f"rank-{trainer.mesh.rank}.log", encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root, show = logging.getLogger(), warnings.showwarning
        if trainer.mesh.rank == 0 and not root.handlers:  # otherwise it is known where the user wants to see them
            self._screen = logging.StreamHandler()
            self._screen.setLevel(logging.WARNING)
        logging.captureWarnings(True)
        self._captures = warnings.showwarning is not show  # somebody else may capture them already
        root.addHandler(self._handler)
        root.addHandler(self._screen)
        self._note(logging.INFO, f"training begins after step {trainer.step}, layout {trainer.mesh}")

    @hookimpl
    def femto_train_end(self, trainer: Trainer) -> None:
        failed = sys.exc_info()[0] is not None  # the trainer calls this on its way out of an exception too
        self._note(logging.ERROR if failed else logging.INFO, f"training ends after step {trainer.step}", failed=failed)
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger().removeHandler(self._screen)
        if self._captures:
            logging.captureWarnings(False)
        self._handler.close()

    def _note(self, level: int, text: str, *, failed: bool = False) -> None:
        # Straight to the file: the root logger's level is the user's business.
        record = logging.LogRecord("femto", level, __file__, 0, text, None, sys.exc_info() if failed else None)
        self._handler.handle(record)

"""Each rank's own log: Python's logging and warnings of a run, and the traceback that ended it, in logs/rank-N.log."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class Logs:
    """Listens on the root logger while a run goes on."""

    def __init__(self) -> None:
        self._handler: logging.Handler = logging.NullHandler()

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        folder = trainer.run_dir / "logs"
        folder.mkdir(exist_ok=True)
        self._handler = logging.FileHandler(folder / f"rank-{trainer.mesh.rank}.log", encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.captureWarnings(True)
        logging.getLogger().addHandler(self._handler)
        self._note(logging.INFO, f"training begins after step {trainer.step}, layout {trainer.mesh}")

    @hookimpl
    def femto_train_end(self, trainer: Trainer) -> None:
        failed = sys.exc_info()[0] is not None  # the trainer calls this on its way out of an exception too
        self._note(logging.ERROR if failed else logging.INFO, f"training ends after step {trainer.step}", failed=failed)
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(False)
        self._handler.close()

    def _note(self, level: int, text: str, *, failed: bool = False) -> None:
        # Straight to the file: the root logger's level is the user's business.
        record = logging.LogRecord("femto", level, __file__, 0, text, None, sys.exc_info() if failed else None)
        self._handler.handle(record)

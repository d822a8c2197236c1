"""One log a rank, logs/rank-N.log: Python's logging and warnings during a run, and the traceback that ended it.

Warnings of rank 0 are on the screen too, as without a log.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class Logs:
    """Listens on the root logger during a run."""

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
        if trainer.mesh.rank == 0 and not root.handlers:  # the user has not configured logging
            self._screen = logging.StreamHandler()
            self._screen.setLevel(logging.WARNING)
        logging.captureWarnings(True)
        self._captures = warnings.showwarning is not show  # false if warnings were captured before
        root.addHandler(self._handler)
        root.addHandler(self._screen)
        self._note(logging.INFO, f"training begins after step {trainer.step}, layout {trainer.mesh}")

    @hookimpl
    def femto_train_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self._note(logging.INFO if error is None else logging.ERROR, f"training ends after step {trainer.step}", error)
        logging.getLogger().removeHandler(self._handler)
        logging.getLogger().removeHandler(self._screen)
        if self._captures:
            logging.captureWarnings(False)
        self._handler.close()

    def _note(self, level: int, text: str, error: BaseException | None = None) -> None:
        # Straight to the file, whatever level the user has set on the root logger.
        info = None if error is None else (type(error), error, error.__traceback__)
        self._handler.handle(logging.LogRecord("femto", level, __file__, 0, text, None, info))

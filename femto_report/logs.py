"""One log a rank, logs/rank-N.log: Python's logging and warnings during a run, and the traceback that ended it.

Warnings of rank 0 are on the screen too, as without a log.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from femto_core.hookspecs import hookimpl
from femto_report.writing import Writing

if TYPE_CHECKING:
    from femto_core.trainer import Trainer


class LogFile(logging.FileHandler):
    """A log; where a line cannot be written, that is said once."""

    def __init__(self, path: Path, writing: Writing) -> None:
        super().__init__(path, encoding="utf-8")
        self._path, self._writing = path, writing

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._writing.failed(self._path, error)
        else:  # a line whose arguments do not fit it
            super().handleError(record)


class Logs:
    """Listens on the root logger during a run."""

    def __init__(self) -> None:
        self._handler: logging.Handler = logging.NullHandler()
        self._screen: logging.Handler = logging.NullHandler()
        self._captures = False
        self._writing, self._path = Writing(), Path()

    @hookimpl
    def femto_train_begin(self, trainer: Trainer) -> None:
        path = trainer.run_dir / "logs" / f"rank-{trainer.mesh.rank}.log"
        self._writing, self._path = Writing(), path
        with self._writing.to(path):
            path.parent.mkdir(parents=True, exist_ok=True)  # rank 0 made the run's on its own machine
            self._handler = LogFile(path, self._writing)
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
        with self._writing.to(self._path):
            self._handler.close()

    def _note(self, level: int, text: str, error: BaseException | None = None) -> None:
        # Straight to the file, whatever level the user has set on the root logger.
        info = None if error is None else (type(error), error, error.__traceback__)
        self._handler.handle(logging.LogRecord("femto", level, __file__, 0, text, None, info))

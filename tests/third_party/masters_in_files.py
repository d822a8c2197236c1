"""A wrapper around whatever precision there is: its masters live in memory-mapped files instead of memory."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from femto_core.hookspecs import hookimpl
from femto_core.layout import ParamLayout
from femto_core.precision import ParamShare, Precision


class MastersInFiles:
    """Passes everything on to the wrapped precision but the making of masters."""

    def __init__(self, inner: Precision, folder: Path) -> None:
        self._inner, self._folder = inner, folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def make_share(self, name: str, compute: nn.Parameter, layout: ParamLayout) -> ParamShare:
        share = self._inner.make_share(name, compute, layout)
        if share.master is share.compute or not share.master.numel():
            return share
        file, master = self._folder / name, share.master
        values = torch.from_file(str(file), shared=True, size=master.numel(), dtype=master.dtype)
        return attrs.evolve(share, master=nn.Parameter(values.view(master.shape)))


class MastersInFilesPlugin:
    """The plugin."""

    def __init__(self) -> None:
        self._files = contextlib.ExitStack()

    @hookimpl(wrapper=True)
    def femto_precision(self) -> Generator[None, Precision, Any]:
        precision = yield
        folder = self._files.enter_context(tempfile.TemporaryDirectory(prefix="masters-"))
        return MastersInFiles(precision, Path(folder))

    @hookimpl
    def femto_train_end(self) -> None:
        self._files.close()  # what is mapped stays readable

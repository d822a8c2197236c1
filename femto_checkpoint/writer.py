"""Writing one checkpoint: every rank writes its own files, then rank 0 writes the index and renames the folder.

Ranks signal each other through small files in the folder, because the process groups belong to the training thread
meanwhile. Everything a reader can see is complete and on disk, in this order: all files, the index, the folder's name,
`latest`.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch

from femto_checkpoint.files import FileSums, checksum_of, copy_files, side_files, write_json, write_safetensors
from femto_checkpoint.folder import PARTIAL, REPLACED, latest_checkpoint, record, rotate
from femto_checkpoint.generation import write_generation
from femto_checkpoint.index import FORMAT, Index, SavedTensor, Scalar, write_index
from femto_checkpoint.snapshot import Snapshot, merge, merge_scalars
from femto_core.checkpoint import RunState
from femto_core.sections import CheckpointSection
from femto_data.atomic import sync, sync_tree

POLL_S = 0.02
MODEL = "model"


@attrs.define(kw_only=True)
class Writer:
    """One rank's part in writing one checkpoint, in a thread."""

    partial: Path
    final: Path
    step: int
    rank: int
    world_size: int
    layout: str
    section: CheckpointSection
    snapshot: Snapshot | None
    parts: dict[str, Any]
    state: RunState
    model: dict[str, Any]
    generation: dict[str, Any]
    """The generation config of the model that training started from."""
    on_failure: Callable[[], None]
    """Called in the thread after `failure` is set."""
    failure: BaseException | None = None
    """The error that ended the thread; the training thread raises it."""
    deadline: float = attrs.field(init=False)
    _complete: bool = attrs.field(default=False, init=False)
    _given_up: str = attrs.field(default="", init=False)
    _thread: threading.Thread = attrs.field(init=False)

    def start(self) -> None:
        """Start the writing thread."""
        self.deadline = time.monotonic() + self.section.timeout
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{self.step}")
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread, and return whether it ended.

        Without a timeout rank 0 waits as long as it takes, other ranks until the deadline.
        """
        if timeout_s is None and self.rank:
            timeout_s = max(0.0, self.deadline - time.monotonic())
        self._thread.join(timeout_s)
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the thread has ended, with or without an error."""
        return not self._thread.is_alive()

    def give_up(self, reason: str) -> None:
        """Make rank 0 stop waiting for other ranks' shares; `reason` becomes its error."""
        self._given_up = reason

    @property
    def problem(self) -> str:
        """Why this rank's share is not on disk, for rank 0 to report; empty if it is."""
        if not self.ended:
            return f"rank {self.rank} has not written its share within {self.section.timeout:g} s"
        return "" if self.failure is None else f"rank {self.rank}: {reason_of(self.failure)}"

    def complaint(self, reason: object) -> str:
        """Return the error sentence for this checkpoint, given the `reason`."""
        if self._complete:
            return f"checkpoint of step {self.step} is complete, but older ones could not be removed: {reason}"
        kept = latest_checkpoint(self.final.parent)
        return (
            f"checkpoint of step {self.step} could not be written to {self.final.parent}: {reason}; "
            f"the newest complete one is {kept.name.removeprefix(REPLACED) if kept else 'none'}"
        )

    def _run(self) -> None:
        try:
            self._write_share()
            self.snapshot, self.parts = None, {}  # free the copies, which are large
            if self.rank == 0:
                self._commit()
        except BaseException as error:  # noqa: BLE001 - raised again in the training thread
            self.failure = error
            self.snapshot, self.parts = None, {}
            self._tell(reason_of(error))
            self.on_failure()

    def _tell(self, reason: str) -> None:
        """Report a failure to rank 0, even on a disk that is full or cannot sync; an empty file also reports it."""
        marker, draft = self.partial / f"{self._name}.failed", self.partial / f".{self._name}.failed"
        with contextlib.suppress(OSError):
            for file in self.partial.glob(f"{self._name}.*"):
                file.unlink()  # make room on a full disk
        try:
            draft.write_text(reason, encoding="utf-8")
            draft.replace(marker)
        except OSError:
            with contextlib.suppress(OSError):
                marker.touch()

    @property
    def _name(self) -> str:
        return f"rank-{self.rank:05}"

    def _write_share(self) -> None:
        snapshot = self.snapshot
        assert snapshot is not None
        tensors, parts = self.partial / f"{self._name}.safetensors", self.partial / f"{self._name}.pt"
        if not self.partial.is_dir():
            raise OSError(
                "the folder that rank 0 made is not visible here; run.dir must be one folder for all machines"
            )
        values = snapshot.tensors
        shapes = {key: tuple(value.shape) for key, value in values.items()}
        dtypes = {key: value.dtype for key, value in values.items()}
        files = {tensors.name: write_safetensors(tensors, shapes, dtypes, values.__getitem__, {"format": FORMAT})}
        serialised = io.BytesIO()  # on a full disk torch.save to a file raises a bare RuntimeError
        torch.save(self.parts, serialised)
        parts.write_bytes(serialised.getbuffer())
        sync(parts)
        files[parts.name] = checksum_of(parts)
        if self.rank == 0:
            files |= self._write_model()
        sync(self.partial)
        share = {
            "files": files,
            "tensors": cattrs.unstructure(snapshot.index),
            "scalars": cattrs.unstructure(snapshot.scalars),
        }
        write_json(self.partial / f"{self._name}.done", share)

    def _write_model(self) -> dict[str, FileSums]:
        folder = self.partial / MODEL
        if self.state.tokenizer_path.is_dir():
            copy_files(self.state.tokenizer_path, side_files(self.state.tokenizer_path), folder)
        self.state.model_config.save_pretrained(
            folder
        )  # last, since the tokenizer's folder may have another config.json
        write_generation(folder, self.state.model_config, self.generation)
        sync_tree(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(self.partial).as_posix(): checksum_of(path) for path in files}

    def _commit(self) -> None:
        self.deadline = max(self.deadline, time.monotonic() + self.section.timeout)
        shares = [self._share(rank) for rank in range(self.world_size)]
        files = {name: sums for share in shares for name, sums in share["files"].items()}
        for name, sums in files.items():
            if (size := (self.partial / name).stat().st_size) != sums["bytes"]:
                raise OSError(f"{name} has {size} bytes, but {sums['bytes']} were written")
        index = Index(
            step=self.step,
            layout=self.layout,
            identity=self.state.identity,
            model=self.model,
            plugins=self.state.plugins,
            config=self.state.config,
            tensors=merge([cattrs.structure(share["tensors"], dict[str, SavedTensor]) for share in shares]),
            scalars=merge_scalars([cattrs.structure(share["scalars"], dict[str, Scalar]) for share in shares]),
            files=files,
        )
        for marker in self.partial.glob("rank-*.done"):
            marker.unlink()
        write_index(self.partial, index)
        sync(self.partial)
        folder = self.final.parent
        if self.final.exists():
            self.final.rename(self.final.with_name(f"{REPLACED}{self.final.name}"))
        self.partial.rename(self.final)
        sync(folder)
        record(folder, self.final.name)
        self._complete = True
        shutil.rmtree(self.final.with_name(f"{REPLACED}{self.final.name}"), ignore_errors=True)
        rotate(folder, keep=self.section.keep, keep_every=self.section.keep_every)

    def _share(self, rank: int) -> dict[str, Any]:
        """Return a rank's share when it is on disk. Raises OSError if that rank failed or is too late."""
        done, failed = self.partial / f"rank-{rank:05}.done", self.partial / f"rank-{rank:05}.failed"
        while not done.exists():
            if failed.exists():
                raise OSError(f"rank {rank}: {failed.read_text(encoding='utf-8') or 'could not write its share'}")
            if self._given_up:
                raise OSError(self._given_up)
            if time.monotonic() > self.deadline:
                raise OSError(f"rank {rank} has not written its share within {self.section.timeout:g} s")
            time.sleep(POLL_S)
        share: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return share


def reason_of(error: BaseException) -> str:
    """Return the text of `error`, or the name of its type if it has none."""
    return str(error) or type(error).__name__


def partial_folder(folder: Path, step: int, token: str) -> Path:
    """Return the folder in which the checkpoint of `step` is written before it is renamed."""
    return folder / f"{PARTIAL}step-{step}-{token}"

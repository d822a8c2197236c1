"""Saving and loading: snapshots written beside training, committed last, kept in rotation."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import cattrs
import torch

from femto_checkpoint.files import DTYPES, checksum_of, sync_folder, write_json, write_safetensors
from femto_checkpoint.index import FORMAT, INDEX, Checkpoint, Index, SavedTensor
from femto_checkpoint.snapshot import MASTER, Snapshot, merge, restore, take_snapshot
from femto_core.checkpoint import RunState, Stateful
from femto_core.errors import UserError
from femto_core.mesh import Mesh
from femto_core.sections import CheckpointSection

POLL_S = 0.02
LATEST = "latest"


@attrs.frozen(kw_only=True)
class Save:
    """One checkpoint on its way to disk, as one rank sees it."""

    partial: Path
    final: Path
    step: int
    snapshot: Snapshot
    parts: dict[str, Any]
    state: RunState


class CheckpointStore:
    """The checkpoints of a run. Each rank writes its own files; rank 0 commits when all have.

    Ranks tell each other through small files in the folder itself, so that a thread can wait for them while training
    goes on and uses the process groups.
    """

    def __init__(self, mesh: Mesh, section: CheckpointSection) -> None:
        self._mesh, self._section = mesh, section
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def save(self, folder: Path, step: int, state: RunState) -> None:
        """Take a snapshot of `state` now and write it as `folder`/step-N, in a thread unless `checkpoint.wait` is set.

        Called by every rank. Raises `UserError` where this or the save before could not be written.
        """
        self.wait()
        partial = folder / f".partial-step-{step}-{self._mesh.from_first(secrets.token_hex(4))}"
        self._try(lambda: partial.mkdir(parents=True, exist_ok=True), folder)
        name = f"rank-{self._mesh.rank:05}"
        copy = not self._section.wait
        job = Save(
            partial=partial,
            final=folder / f"step-{step}",
            step=step,
            snapshot=take_snapshot(state, self._mesh, f"{name}.safetensors", copy=copy),
            parts={part: dict(value.state_dict()) for part, value in {**state.parts, **state.rank_parts}.items()},
            state=state,
        )
        self._thread = threading.Thread(target=self._run, args=(job,), name=f"checkpoint-{step}")
        self._thread.start()
        if self._section.wait:
            self.wait()
            self._mesh.barrier()

    def wait(self) -> None:
        """Return when the save under way is on disk. Raises `UserError` where it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise UserError(str(failure)) from None

    def load(self, path: Path, state: RunState, *, weights_only: bool) -> None:
        """Fill `state` from the checkpoint at `path`, whatever layout saved it; every rank reads just what it needs.

        Raises `UserError` on all ranks alike, with `state` untouched, where it is damaged or does not fit.
        """
        checkpoint, problem, parts = None, "", dict[str, Any]()
        everyones = set().union(*self._mesh.gather_objects({group.layout.name for group in state.groups}))
        try:
            checkpoint = Checkpoint(path)
            check_parameters(checkpoint, state, everyones, same_dtype=not weights_only)
            if not weights_only:
                check_identity(checkpoint, state)
            parts = self._verify(checkpoint, state, weights_only=weights_only)
        except UserError as error:
            problem = str(error)
        if problems := [text for text in self._mesh.gather_objects(problem) if text]:
            raise UserError(problems[0])
        assert checkpoint is not None
        index = checkpoint.index
        kept = {name.partition("/")[0] for name in (*index.tensors, *index.scalars)}
        restore(state, checkpoint.read, index.scalars, {MASTER} if weights_only else kept)
        if not weights_only:
            same_layout = index.layout == str(self._mesh)
            wanted: dict[str, Stateful] = {**state.parts, **(state.rank_parts if same_layout else {})}
            for name, part in wanted.items():
                part.load_state_dict(parts[name])

    def latest(self, folder: Path) -> Path | None:
        """Return the checkpoint committed last."""
        return latest_checkpoint(folder)

    def _verify(self, checkpoint: Checkpoint, state: RunState, *, weights_only: bool) -> dict[str, Any]:
        """Make sure that all files this rank will read are intact; return its parts."""
        index, path = checkpoint.index, checkpoint.path
        files = {
            file
            for group in state.groups
            for name in index.tensors
            if name.partition("/")[2] == group.layout.name and (not weights_only or name.startswith(MASTER))
            for file in checkpoint.files_for(name, group.layout.owned())
        }
        checkpoint.verify(files)
        if weights_only:
            return {}
        rank = self._mesh.rank if index.layout == str(self._mesh) else 0
        file = f"rank-{rank:05}.pt"
        checkpoint.verify([file])
        parts: dict[str, Any] = torch.load(path / file, weights_only=True)  # never runs code from the file
        if missing := [name for name in state.parts if name not in parts]:
            raise UserError(f"{path} has no part {missing[0]!r}: it was saved without the plugin that keeps it")
        return parts

    def _run(self, job: Save) -> None:
        try:
            self._write(job)
            if self._mesh.rank == 0:
                self._commit(job)
        except Exception as error:  # noqa: BLE001 - raised again by wait(), in the training thread
            kept = latest_checkpoint(job.final.parent)
            text = f"checkpoint of step {job.step} could not be written to {job.final.parent}: {error}"
            self._failure = UserError(f"{text}; the newest complete one is {kept.name if kept else 'none'}")
            with contextlib.suppress(OSError):
                write_json(job.partial / f"rank-{self._mesh.rank:05}.failed", str(error))

    def _write(self, job: Save) -> None:
        name = f"rank-{self._mesh.rank:05}"
        tensors, parts = job.partial / f"{name}.safetensors", job.partial / f"{name}.pt"
        values = job.snapshot.tensors
        shapes = {key: tuple(value.shape) for key, value in values.items()}
        dtypes = {key: value.dtype for key, value in values.items()}
        files = {tensors.name: write_safetensors(tensors, shapes, dtypes, values.__getitem__, {"format": FORMAT})}
        torch.save(job.parts, parts)
        files[parts.name] = checksum_of(parts)
        if self._mesh.rank == 0:
            self._write_model(job)
        share = {"files": files, "tensors": cattrs.unstructure(job.snapshot.index), "scalars": job.snapshot.scalars}
        write_json(job.partial / f"{name}.done", share)

    def _write_model(self, job: Save) -> None:
        folder = job.partial / "model"
        job.state.model_config.save_pretrained(folder)
        if job.state.tokenizer_path.is_dir():
            shutil.copytree(job.state.tokenizer_path, folder, dirs_exist_ok=True)

    def _commit(self, job: Save) -> None:
        shares = [self._share(job.partial, rank) for rank in range(self._mesh.world_size)]
        index = Index(
            step=job.step,
            layout=str(self._mesh),
            identity=job.state.identity,
            plugins=job.state.plugins,
            config=job.state.config,
            tensors=merge([cattrs.structure(share["tensors"], dict[str, SavedTensor]) for share in shares]),
            scalars={key: value for share in shares for key, value in share["scalars"].items()},
            files={name: sums for share in shares for name, sums in share["files"].items()},
        )
        for marker in job.partial.glob("rank-*.done"):
            marker.unlink()
        write_json(job.partial / INDEX, cattrs.unstructure(index))
        sync_folder(job.partial)
        replaced = job.final.with_name(f".replaced-{job.final.name}")
        if job.final.exists():
            job.final.rename(replaced)
        job.partial.rename(job.final)
        sync_folder(job.final.parent)
        pointer = job.final.parent / f".{LATEST}.partial"
        pointer.write_text(job.final.name, encoding="utf-8")
        pointer.replace(job.final.parent / LATEST)
        sync_folder(job.final.parent)
        self._rotate(job)

    def _share(self, partial: Path, rank: int) -> dict[str, Any]:
        """Wait for a rank's share to be on disk. Raises where that rank says that it failed."""
        done, failed = partial / f"rank-{rank:05}.done", partial / f"rank-{rank:05}.failed"
        deadline = time.monotonic() + self._section.timeout
        while not done.exists():
            if failed.exists():
                raise OSError(f"rank {rank}: {json.loads(failed.read_text())}")
            if time.monotonic() > deadline:
                raise OSError(f"rank {rank} has not written its share within {self._section.timeout:.0f} s")
            time.sleep(POLL_S)
        share: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return share

    def _rotate(self, job: Save) -> None:
        """Remove what is no longer wanted; only now, when a newer one is complete."""
        folder, section = job.final.parent, self._section
        complete = complete_checkpoints(folder)
        mine = sorted(step for step in complete if step <= job.step)
        for step in mine[: -section.keep] if section.keep else []:
            if not (section.keep_every and step % section.keep_every == 0):
                shutil.rmtree(complete[step], ignore_errors=True)
        for leftover in [*folder.glob(".partial-step-*"), *folder.glob(".replaced-step-*")]:
            shutil.rmtree(leftover, ignore_errors=True)

    @staticmethod
    def _try(action: Callable[[], None], folder: Path) -> None:
        try:
            action()
        except OSError as error:
            raise UserError(f"checkpoints cannot be written to {folder}: {error}") from None


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint committed last in `folder`, or the one of the highest step where that record is lost."""
    try:
        named = folder / (folder / LATEST).read_text(encoding="utf-8").strip()
        if (named / INDEX).is_file():
            return named
    except OSError:
        pass
    complete = complete_checkpoints(folder)
    return complete[max(complete)] if complete else None


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Return the complete checkpoints in `folder` by their step."""
    names = re.compile(r"(?:\.replaced-)?step-(\d+)")  # of two of one step, step-N sorts last and wins
    found = sorted((p for p in folder.glob("*step-*") if names.fullmatch(p.name)), key=lambda p: p.name)
    return {int(m[1]): p for p in found if (m := names.fullmatch(p.name)) and (p / INDEX).is_file()}


def check_parameters(checkpoint: Checkpoint, state: RunState, everyones: set[str], *, same_dtype: bool) -> None:
    """Refuse a checkpoint of another model: `everyones` are the names of all parameters that any rank holds."""
    index, path = checkpoint.index, checkpoint.path
    for group in state.groups:
        name, shape = group.layout.name, group.layout.global_shape
        saved = index.tensors.get(f"{MASTER}/{name}")
        if saved is None:
            raise UserError(f"{path} has no {name}, which this run's model has")
        if saved.shape != shape:
            raise UserError(f"{path}: {name} has shape {saved.shape}, in this run's model {shape}")
        if same_dtype and saved.dtype != DTYPES[group.master.dtype]:
            raise UserError(
                f"{path}: {name} was saved as {saved.dtype}, this run updates it as {DTYPES[group.master.dtype]}; set the "
                "same train.dtype, or take over only the weights with --checkpoint.weights-only"
            )
    extra = {n.partition("/")[2] for n in index.tensors if n.startswith(f"{MASTER}/")} - everyones
    if extra:
        raise UserError(f"{path} holds {min(extra)}, which this run's model does not have")


def check_identity(checkpoint: Checkpoint, state: RunState) -> None:
    """Refuse to go on from a run on other data, in other batches, or from another seed."""
    for key, mine in state.identity.items():
        found = checkpoint.index.identity.get(key)
        if found != mine:
            raise UserError(
                f"{checkpoint.path} was saved with {key} = {found!r}, this run has {mine!r}; to take over only its "
                "weights, set --checkpoint.weights-only"
            )

"""Saving and loading a run's checkpoints: written in a background thread, committed by rank 0, rotated."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from femto_checkpoint.compatibility import (
    WEIGHTS_ONLY,
    check_identity,
    check_model,
    check_parameters,
    check_tokenizer,
    plain_config,
)
from femto_checkpoint.folder import committed, complete_checkpoints, latest_checkpoint, sweep
from femto_checkpoint.index import MASTER, Checkpoint, DamagedError
from femto_checkpoint.snapshot import equal_states, plain_copy, restore, take_snapshot
from femto_checkpoint.writer import Writer, partial_folder, reason_of
from femto_core.checkpoint import RunState, Stateful
from femto_core.errors import UserError
from femto_core.mesh import Mesh
from femto_core.sections import CheckpointSection
from femto_data.atomic import sync

LAST_CHANCE_S = 15.0
PARTS = re.compile(r"rank-\d{5,}\.pt")


class CheckpointStore:
    """The checkpoints of a run. Each rank writes its own files; rank 0 commits when all ranks have written."""

    def __init__(self, mesh: Mesh, section: CheckpointSection, generation: dict[str, Any]) -> None:
        """`generation`: the generation config of the model that training starts from, which checkpoints keep."""
        self._mesh, self._section, self._generation = mesh, section, generation
        self._writer: Writer | None = None

    @property
    def saving(self) -> bool:
        """Whether this rank is still writing its share of a save."""
        return self._writer is not None and not self._writer.ended

    def save(self, folder: Path, step: int, state: RunState, *, on_failure: Callable[[], None]) -> None:
        """Take a snapshot of `state` and write it as `folder`/step-N, in a thread unless `checkpoint.wait` is set.

        Called by every rank. Raises `UserError` on all ranks if this save or the previous one failed on any rank.
        """
        self.wait()
        partial, problem = partial_folder(folder, step, secrets.token_hex(4)), ""
        if self._mesh.rank == 0:
            try:
                problem = prepare(folder, partial, step)
            except OSError as error:
                problem = f"checkpoints cannot be written to {folder}: {error}"
        partial, problem = self._mesh.from_first((partial, problem))
        if problem:
            raise UserError(problem)
        everything = {**state.parts, **state.rank_parts}
        self._writer = Writer(
            partial=partial,
            final=folder / f"step-{step}",
            step=step,
            rank=self._mesh.rank,
            world_size=self._mesh.world_size,
            layout=str(self._mesh),
            section=self._section,
            snapshot=take_snapshot(
                state, self._mesh, f"rank-{self._mesh.rank:05}.safetensors", copy=not self._section.wait
            ),
            parts={name: plain_copy(part.state_dict(), f"part {name!r}") for name, part in everything.items()},
            state=state,
            model=plain_config(state.model_config),
            generation=self._generation,
            on_failure=on_failure,
        )
        self._writer.start()
        if self._section.wait:
            self.wait()

    def wait(self) -> None:
        """Return when the current save is on disk. Raises `UserError` on all ranks if it failed on any rank.

        On a rank whose thread ended with a defect, the defect itself is raised.
        """
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if writer.rank:
            writer.join()
        # Rank 0 asks the other ranks before it joins its thread, which may be waiting for a share that never comes.
        answers = self._mesh.gather_objects((writer.problem, writer.ended) if writer.rank else ("", True))
        said = ""
        if not writer.rank:
            writer.give_up(next((problem for problem, _ in answers if problem), ""))
            writer.join()
            said = "" if writer.failure is None else writer.complaint(reason_of(writer.failure))
            if said and all(ended for _, ended in answers):
                sweep(writer.final.parent)  # all ranks have stopped writing; make room on a full disk
        said = self._mesh.from_first(said)  # rank 0 decides: a committed checkpoint is complete
        if not said:
            return
        if writer.failure is not None and not isinstance(writer.failure, OSError | UserError):
            raise writer.failure
        raise UserError(said)

    def close(self) -> None:
        """Wait up to 15 s for the current save, without collectives, because the run may end on an error."""
        writer, self._writer = self._writer, None
        if writer is not None and not writer.join(LAST_CHANCE_S):
            writer.give_up("the run has ended")

    def load(self, path: Path, state: RunState, *, weights_only: bool) -> None:
        """Load the checkpoint at `path`, saved under any layout, into `state`; each rank reads only what it owns.

        If the checkpoint is damaged or does not fit, raises the same `UserError` on all ranks, with weights and
        optimizer unchanged.
        """
        checkpoint, parts, files = None, dict[str, Any](), set[str]()
        all_names = set().union(*self._mesh.gather_objects({share.layout.name for share in state.shares}))
        try:
            checkpoint = Checkpoint(path)
            check_parameters(checkpoint, state, all_names, same_dtype=not weights_only)
            check_model(checkpoint, state, weights_only=weights_only)
            check_tokenizer(checkpoint, state)
            if not weights_only:
                check_identity(checkpoint, state)
            files = self._files(checkpoint, state, weights_only=weights_only)
            problem: UserError | None = None
        except UserError as error:
            problem = error
        wanted = sorted(set().union(*self._agree(problem, path, files)))
        assert checkpoint is not None
        try:
            # Each file is verified once, by one rank, also if several ranks read it.
            checkpoint.verify(wanted[self._mesh.rank :: self._mesh.world_size])
            if not weights_only:
                parts = self._read_parts(checkpoint, state)
                self._check_parts(checkpoint, state, parts)
        except UserError as error:
            problem = error
        self._agree(problem, path, files)
        if not weights_only:
            problem = self._load_parts(checkpoint, state, parts)
            self._agree(problem, path, files)
        index = checkpoint.index
        restore(state, checkpoint.read, {} if weights_only else kept_fields(checkpoint), index.scalars)
        if not weights_only:
            self._say_what_is_left(checkpoint, state, parts)

    def latest(self, folder: Path) -> Path | None:
        """Return the checkpoint in `folder` that was committed last, if there is one."""
        return latest_checkpoint(folder)

    def _agree(self, problem: UserError | None, path: Path, files: set[str]) -> list[set[str]]:
        """Return every rank's `files`. If any rank has a problem, raises the first rank's on all ranks."""
        answers = self._mesh.gather_objects((str(problem or ""), isinstance(problem, DamagedError), files))
        for text, damaged, _ in answers:
            if text:
                others = [p for p in committed(path.parent) if p != path] if damaged else []
                hint = f"; to resume an earlier checkpoint, set --checkpoint.resume {others[-1]}" if others else ""
                raise UserError(text + hint)
        return [found for _, _, found in answers]

    def _parts_rank(self, checkpoint: Checkpoint) -> int:
        """The rank whose parts this rank loads: its own, or rank 0 under another layout."""
        return self._mesh.rank if checkpoint.index.layout == str(self._mesh) else 0

    def _wanted_parts(self, checkpoint: Checkpoint, state: RunState) -> dict[str, Stateful]:
        same = checkpoint.index.layout == str(self._mesh)
        return {**state.parts, **(state.rank_parts if same else {})}

    def _files(self, checkpoint: Checkpoint, state: RunState, *, weights_only: bool) -> set[str]:
        """Return the files this rank will read. Raises `DamagedError` if they do not cover what it owns."""
        fields = {} if weights_only else kept_fields(checkpoint)
        files = set()
        for share in state.shares:
            name = share.layout.name
            for field in [MASTER, *(fields.get(name, ()) if share.trainable and share.master.numel() else ())]:
                if f"{field}/{name}" in checkpoint.index.tensors:
                    files |= checkpoint.files_for(f"{field}/{name}", share.layout.owned())
        return files if weights_only else files | {parts_file(self._parts_rank(checkpoint))}

    def _read_parts(self, checkpoint: Checkpoint, state: RunState) -> dict[str, Any]:
        parts = read_parts(checkpoint, parts_file(self._parts_rank(checkpoint)))
        if missing := [name for name in self._wanted_parts(checkpoint, state) if name not in parts]:
            raise UserError(
                f"{checkpoint.path} has no part {missing[0]!r}: it was saved without the plugin that keeps that part"
            )
        return parts

    def _check_parts(self, checkpoint: Checkpoint, state: RunState, parts: dict[str, Any]) -> None:
        """Refuse, under another layout than the saved one, a part of which rank 0's state is not every rank's.

        Every rank compares some of the saved ranks' parts with rank 0's `parts`.
        """
        if checkpoint.index.layout == str(self._mesh):
            return
        others = sorted(name for name in checkpoint.index.files if PARTS.fullmatch(name))[1:]
        for file in others[self._mesh.rank :: self._mesh.world_size]:
            theirs = read_parts(checkpoint, file)
            for name in state.parts:
                if name not in theirs or not equal_states(parts[name], theirs[name]):
                    raise UserError(
                        f"{checkpoint.path}: the ranks saved different states of the part {name!r} (rank-00000.pt, "
                        f"{file}), which fit only the layout that saved them ({checkpoint.index.layout}; this run has "
                        f"{self._mesh}); resume under that layout, or {WEIGHTS_ONLY}"
                    )

    def _load_parts(self, checkpoint: Checkpoint, state: RunState, parts: dict[str, Any]) -> UserError | None:
        """Load this rank's parts; return what is wrong with the first that does not take what was saved."""
        for name, part in self._wanted_parts(checkpoint, state).items():
            try:
                part.load_state_dict(parts[name])
            except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
                file = checkpoint.path / parts_file(self._parts_rank(checkpoint))
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                return DamagedError(f"{file}: the part {name!r} cannot be taken over ({reason})")
        return None

    def _say_what_is_left(self, checkpoint: Checkpoint, state: RunState, parts: dict[str, Any]) -> None:
        left = [name for name in parts if name not in {**state.parts, **state.rank_parts}]
        if left and self._mesh.rank == 0:
            print(
                f"checkpoint {checkpoint.path} also holds {', '.join(left)}, which no active plugin keeps",
                file=sys.stderr,
                flush=True,
            )


def prepare(folder: Path, partial: Path, step: int) -> str:
    """Make the folder for the checkpoint of `step`; return a sentence if something is in the way."""
    folder.mkdir(parents=True, exist_ok=True)
    sync(folder.parent)
    sweep(folder)
    final = folder / f"step-{step}"
    if final.exists() and step not in complete_checkpoints(folder):
        return f"checkpoint of step {step} cannot be written: {final} exists and is not a checkpoint; move it away"
    partial.mkdir()
    return ""


def parts_file(rank: int) -> str:
    """Return the name of the file of a rank's parts."""
    return f"rank-{rank:05}.pt"


def read_parts(checkpoint: Checkpoint, file: str) -> dict[str, Any]:
    """Return the parts in a rank's `file` by name, verified. Raises `DamagedError` where it cannot be read."""
    checkpoint.verify([file])  # every rank verifies the file it parses, before it parses it
    try:
        # weights_only=True builds plain values and tensors, and never runs code from the file.
        return dict(torch.load(checkpoint.path / file, map_location="cpu", weights_only=True))
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        raise DamagedError(f"{checkpoint.path / file} cannot be read: {type(error).__name__}") from None


def kept_fields(checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return the fields of saved optimizer state of each parameter, by the parameter's name."""
    fields: dict[str, set[str]] = {}
    for key in (*checkpoint.index.tensors, *checkpoint.index.scalars):
        field, _, name = key.partition("/")
        if field != MASTER:
            fields.setdefault(name, set()).add(field)
    return fields

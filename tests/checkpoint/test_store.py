"""Incomplete, damaged and foreign checkpoints are refused on all ranks; a broken save keeps the older checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import save_file

from femto_checkpoint import files as written_files
from femto_checkpoint import writer as writers
from femto_checkpoint.folder import committed, complete_checkpoints, latest_checkpoint, record, rotate, sweep
from femto_checkpoint.index import FORMAT, INDEX, read_index, write_index
from femto_core.errors import UserError
from femto_tools.testing import WorkerPool, make_trainer
from tests.checkpoint.runs import attempt, checkpoint_of, refusal, train_until, values


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    """A copy of the good run, to be damaged."""
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    return tmp_path


# What is in a checkpoint.


def test_a_checkpoint_is_a_share_of_each_rank_the_model_and_an_index(good: Path) -> None:
    folder = checkpoint_of(good, 2)
    assert sorted(f.name for f in folder.iterdir()) == [
        "checkpoint.json",
        "model",
        "rank-00000.pt",
        "rank-00000.safetensors",
        "rank-00001.pt",
        "rank-00001.safetensors",
    ]
    index = json.loads((folder / INDEX).read_text())
    assert index["format"] == FORMAT
    assert index["step"] == 2
    assert index["layout"] == "dp 2"
    assert index["config"]["data"]["global_batch"] == 8
    assert "checkpoint" in index["plugins"] or index["plugins"], "names and versions of active plugins"
    assert index["identity"]["train.seed"] == 0
    listed = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {INDEX}
    assert set(index["files"]) == listed, "every file has its checksum"
    names = {name for name in index["tensors"] if name.startswith("master/")}
    assert "master/model.embed_tokens.weight" in names
    assert {f"exp_avg/{name.partition('/')[2]}" for name in names} <= set(index["tensors"])
    parts = torch.load(folder / "rank-00001.pt", weights_only=True)
    assert parts["trainer"] == {"step": 2, "skipped": 0, "tokens_seen": parts["trainer"]["tokens_seen"]}
    assert parts["loader"] == {"step": 2}
    assert parts["rng"]["cpu"].dtype == torch.uint8


# Damage.


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def longer(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 8)


def replace(file: Path) -> None:
    file.write_bytes(b"This is something else altogether.\n" * 100)


def flip(place: float) -> Callable[[Path], None]:
    def flipped(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 0x10
        file.write_bytes(content)

    flipped.__name__ = f"flip at {place:.0%}"
    return flipped


def swap(file: Path) -> None:
    """Replace a rank's file by another rank's."""
    shutil.copy(file.with_name(file.name.replace("00001", "00000")), file)


def other_pickle(file: Path) -> None:
    torch.save([1, 2, 3], file)


def other_tensors(file: Path) -> None:
    save_file({"something": torch.ones(3)}, file)


FLIPS = [flip(place) for place in (0.0, 0.02, 0.3, 0.6, 0.999)]
DAMAGES: list[Callable[[Path], None]] = [Path.unlink, truncate, empty, longer, replace, swap, *FLIPS]


def damages_of(copy: Path, file: str, damages: list[Callable[[Path], None]]) -> Iterator[str]:
    """Damage `file` in each way in turn, and restore it."""
    path = checkpoint_of(copy, 2) / file
    before = path.read_bytes()
    for damage in damages:
        damage(path)
        yield damage.__name__
        path.write_bytes(before)


def test_an_undamaged_copy_resumes(pool: WorkerPool, copy: Path) -> None:
    assert pool.run(2, attempt, values(copy, "auto")) == ["resumed at 2"] * 2
    assert pool.run(2, attempt, values(copy / "new", str(checkpoint_of(copy, 2)))) == ["resumed at 2"] * 2


@pytest.mark.parametrize("name", ["rank-00001.safetensors", "rank-00001.pt"])
def test_a_damaged_file_of_any_rank_is_refused_by_all_with_its_name(pool: WorkerPool, copy: Path, name: str) -> None:
    for _ in damages_of(copy, name, [*DAMAGES, other_tensors, other_pickle]):
        answer = refusal(pool, values(copy, "auto"))
        assert answer.startswith(str(checkpoint_of(copy, 2) / name))


@pytest.mark.parametrize("size", [1, 4])
def test_it_is_refused_under_any_number_of_ranks(pool: WorkerPool, copy: Path, size: int) -> None:
    for _ in damages_of(copy, "rank-00001.safetensors", [FLIPS[3]]):
        assert "rank-00001.safetensors is damaged" in refusal(pool, values(copy, "auto"), size)


def test_a_damaged_index_is_refused_by_all_whatever_byte_it_is(pool: WorkerPool, copy: Path) -> None:
    damages = [damage for damage in DAMAGES if damage not in (Path.unlink, swap, longer)]
    for place in damages_of(copy, INDEX, [*damages, *(flip(n / 12) for n in range(12))]):
        answer = refusal(pool, values(copy, "auto"))
        assert str(checkpoint_of(copy, 2)) in answer, place
        assert "damaged" in answer or "format" in answer, place


def test_a_changed_number_in_the_index_is_noticed_too(pool: WorkerPool, copy: Path) -> None:
    index = checkpoint_of(copy, 2) / INDEX
    raw = json.loads(index.read_text())
    raw["scalars"]["step/model.norm.weight"]["value"] += 1
    index.write_text(json.dumps(raw))
    assert "its checksum differs from the saved one" in refusal(pool, values(copy, "auto"))


def test_a_refusal_names_an_earlier_checkpoint_where_there_is_one(pool: WorkerPool, copy: Path) -> None:
    pool.run(2, train_until, values(copy, "auto"), 3)
    truncate(checkpoint_of(copy, 3) / "rank-00000.safetensors")
    answer = refusal(pool, values(copy, "auto"))
    assert answer.endswith(f"to resume an earlier checkpoint, set --checkpoint.resume {checkpoint_of(copy, 2)}")
    assert pool.run(2, attempt, values(copy, str(checkpoint_of(copy, 2)))) == ["resumed at 2"] * 2


class Evil:
    """A pickle that runs code when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ.get("EVIL", "/nonexistent/evil"),)


def load_forged(path: Path) -> str:
    """Load malicious parts whose checksum in the index is right."""
    evil = path.parent / "evil"
    os.environ["EVIL"] = str(evil)
    file = path / "rank-00000.pt"
    torch.save({"trainer": Evil()}, file)
    os.environ.pop("EVIL")
    index = json.loads((path / INDEX).read_text())
    index["files"][file.name] = written_files.checksum_of(file)
    index.pop("xxh3")
    import xxhash

    index["xxh3"] = xxhash.xxh3_64_hexdigest(json.dumps(index, sort_keys=True).encode())
    (path / INDEX).write_text(json.dumps(index))
    try:
        make_trainer(values(path.parent / "new", str(path)))
    except UserError as error:
        assert not evil.exists()
        return str(error)
    return "loaded"


def test_loading_never_runs_code_from_a_file(pool: WorkerPool, copy: Path) -> None:
    [answer] = pool.run(1, load_forged, checkpoint_of(copy, 2))
    assert answer.endswith("rank-00000.pt cannot be read: UnpicklingError")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "not a complete"),
        ("", "damaged"),
        ("{", "damaged"),
        ("[]", "format None"),
        ("null", "format None"),
        ("{}", "format None"),
        ('{"format": "femto-checkpoint-1"}', "has format 'femto-checkpoint-1'; this femto reads 'femto-checkpoint-3'"),
        ('{"format": "femto-checkpoint-3"}', "damaged"),
    ],
    ids=str,
)
def test_a_folder_that_says_something_else_is_refused(
    pool: WorkerPool, copy: Path, text: str | None, words: str
) -> None:
    meta = checkpoint_of(copy, 2) / INDEX
    meta.unlink() if text is None else meta.write_text(text)
    answer = refusal(pool, values(copy, str(checkpoint_of(copy, 2))))
    assert str(checkpoint_of(copy, 2)) in answer
    assert words in answer


# Other runs.


def test_another_dtype_is_refused(pool: WorkerPool, copy: Path) -> None:
    answer = refusal(pool, values(copy, "auto", train={"dtype": "float32"}))
    assert "was saved as F64, this run updates it as F32; set the same train.dtype" in answer


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("model", {"hidden_size": 32}, "model.embed_tokens.weight has shape (32, 16), in this run's model (32, 32)"),
        ("model", {"tied": False}, "has no lm_head.weight, which this run's model has"),
        ("model", {"layers": 3}, "has no model.layers.2."),
        ("model", {"layers": 1}, "which this run's model does not have"),
        ("model", {"family": "qwen2"}, "q_proj.bias"),
        ("model", {"family": "mistral"}, "of a model with model_type = 'llama', this run's has 'mistral'"),
        ("model", {"heads": 2, "kv_heads": 1}, "with num_attention_heads = 4, this run's has 2"),
        ("train", {"seed": 1}, "was saved with train.seed = 0, this run has 1"),
        ("data", {"global_batch": 4}, "was saved with data.global_batch = 8, this run has 4"),
        ("data", {"remainder": "pad"}, "was saved with data.remainder = 'drop', this run has 'pad'"),
        ("data", {"shuffle": False}, "was saved with data.shuffle = True, this run has False"),
        ("data", {"seq_len": 4}, "was saved with data.seq_len = 8, this run has 4"),
    ],
    ids=str,
)
def test_what_differs_is_said(
    pool: WorkerPool, tmp_path: Path, good: Path, section: str, change: dict[str, Any], words: str
) -> None:
    settings = values(tmp_path, str(checkpoint_of(good, 2)), **{section: change})
    answer = refusal(pool, settings)
    assert str(checkpoint_of(good, 2)) in answer
    assert words in answer


def test_what_only_another_version_of_transformers_says_of_a_model_is_no_obstacle(pool: WorkerPool, copy: Path) -> None:
    folder = checkpoint_of(copy, 2)
    index = read_index(folder)
    older = {key: value for key, value in index.model.items() if key != "mlp_bias"}
    write_index(folder, attrs.evolve(index, model={**older, "of_old": 1}))
    assert pool.run(2, attempt, values(copy, "auto")) == ["resumed at 2"] * 2


def test_other_heads_are_refused_for_weights_alone_too(pool: WorkerPool, tmp_path: Path, good: Path) -> None:
    section = {"resume": str(checkpoint_of(good, 2)), "weights_only": True}
    answer = refusal(pool, values(tmp_path, checkpoint=section, model={"heads": 2, "kv_heads": 1}))
    assert "with num_attention_heads = 4, this run's has 2" in answer


def test_weights_only_without_a_checkpoint_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    assert "needs the checkpoint" in refusal(pool, values(tmp_path, checkpoint={"weights_only": True}))


def test_weights_only_with_auto_in_a_new_folder_does_not_start_from_random_weights(
    pool: WorkerPool, tmp_path: Path
) -> None:
    answer = refusal(pool, values(tmp_path, "auto", checkpoint={"resume": "auto", "weights_only": True}))
    folder = tmp_path / "test"
    assert answer == (
        f"checkpoint.weights_only: {folder} has no checkpoint to take weights from; set --checkpoint.resume PATH"
    )


def test_a_path_that_is_no_folder_is_refused(pool: WorkerPool, tmp_path: Path) -> None:
    answer = refusal(pool, values(tmp_path, str(tmp_path / "nowhere")))
    assert "nowhere" in answer


def test_a_run_over_old_checkpoints_is_refused_unless_it_resumes(pool: WorkerPool, copy: Path) -> None:
    assert "holds an earlier run" in refusal(pool, values(copy, "none"))


# Which checkpoint is the latest.


def make(folder: Path, name: str, *, complete: bool = True) -> Path:
    made = folder / name
    made.mkdir(parents=True)
    if complete:
        (made / INDEX).write_text(json.dumps({"format": FORMAT}))
    return made


def test_without_a_record_the_latest_is_the_highest_complete_step(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "never written") is None
    assert latest_checkpoint(tmp_path) is None
    make(tmp_path, "step-30", complete=False)
    make(tmp_path, ".partial-step-40-00ff00ff")
    make(tmp_path, "step-50x")
    make(tmp_path, "step-")
    (tmp_path / "step-60").write_text("a file")
    assert latest_checkpoint(tmp_path) is None
    nine = make(tmp_path, "step-9")
    assert latest_checkpoint(tmp_path) == nine
    ten = make(tmp_path, "step-10")
    assert latest_checkpoint(tmp_path) == ten


def test_the_record_decides_and_a_damaged_one_is_no_obstacle(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make(tmp_path, f"step-{step}")
        record(tmp_path, f"step-{step}")
    record(tmp_path, "step-4")  # saved again after a resume from step 2
    assert latest_checkpoint(tmp_path) == tmp_path / "step-4"
    assert [path.name for path in committed(tmp_path)] == ["step-2", "step-6", "step-4"]
    shutil.rmtree(tmp_path / "step-4")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-6", "the newest of those that are there"
    for nonsense in (b"", b"\xff\xfe\x00", b"step-99\n", b"../../etc\n"):
        (tmp_path / "latest").write_bytes(nonsense)
        assert latest_checkpoint(tmp_path) == tmp_path / "step-6"


def test_what_was_being_replaced_counts_only_while_nothing_has_its_name(tmp_path: Path) -> None:
    make(tmp_path, "step-6")
    old = make(tmp_path, ".replaced-step-4")
    record(tmp_path, "step-4")
    assert latest_checkpoint(tmp_path) == old, "killed between two renames: not the stale 6"
    sweep(tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-4"
    make(tmp_path, ".replaced-step-4")
    sweep(tmp_path)
    assert set(complete_checkpoints(tmp_path)) == {4, 6}
    assert not list(tmp_path.glob(".*"))


def test_rotation_goes_by_age_spares_milestones_and_leaves_foreign_folders_alone(tmp_path: Path) -> None:
    for step in (10, 20, 30, 5, 15):
        make(tmp_path, f"step-{step}")
        record(tmp_path, f"step-{step}")
    make(tmp_path, "step-99", complete=False)
    make(tmp_path, "notes")
    rotate(tmp_path, keep=2, keep_every=20)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "notes", "step-15", "step-20", "step-5", "step-99"]


def test_auto_starts_anew_where_there_is_nothing_complete(pool: WorkerPool, tmp_path: Path) -> None:
    checkpoint_of(tmp_path, 5).mkdir(parents=True)
    (checkpoint_of(tmp_path, 5) / "rank-00000.safetensors").write_text("half a file")
    assert pool.run(2, attempt, values(tmp_path, "auto")) == ["resumed at 0"] * 2


# Interrupted saves.


PLACES: dict[str, tuple[Any, str]] = {
    "the share": (writers, "write_safetensors"),
    "the parts": (torch, "save"),
    "the model": (writers.Writer, "_write_model"),
    "a sync": (os, "fsync"),
    "the index": (writers, "write_index"),
    "the name": (Path, "rename"),
    "the record": (writers, "record"),
    "an atomic write": (os, "replace"),
    "rotation": (writers, "rotate"),
    "removal": (shutil, "rmtree"),
}


def save_and_break(settings: dict[str, dict[str, Any]], place: str, call: int, again: bool) -> str:
    """Save step 3, or step 2 once more, and stop at the `call`-th call at `place`."""
    trainer = make_trainer(settings)
    trainer.train_step()
    if again:
        trainer.step = 2  # save the same step again
    owner, name = PLACES[place]
    right, calls = getattr(owner, name), 0

    def fail(*arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= call:
            raise KeyboardInterrupt(place)
        return right(*arguments, **more)

    outcome = "saved"
    setattr(owner, name, fail)
    try:
        trainer.save()
        trainer.checkpointer.wait()
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        setattr(owner, name, right)
        trainer.close()
    return outcome


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("place", "call", "again"),
    [
        ("the share", 1, False),
        ("the parts", 1, False),
        ("the model", 1, False),
        *(("a sync", call, False) for call in (1, 4, 7, 10)),
        ("the index", 1, True),
        ("the name", 1, False),
        ("the name", 1, True),
        ("the name", 2, True),
        ("an atomic write", 1, False),
        ("an atomic write", 2, False),
        ("an atomic write", 3, True),
        ("the record", 1, False),
        ("the record", 1, True),
        ("rotation", 1, False),
        ("removal", 1, False),
        ("removal", 1, True),
    ],
    ids=str,
)
def test_a_save_broken_anywhere_leaves_a_checkpoint_to_resume_from(
    pool: WorkerPool, copy: Path, place: str, call: int, again: bool
) -> None:
    section = {"checkpoint": {"resume": "auto", "keep": 1}}
    [outcome] = pool.run(1, save_and_break, values(copy, **section), place, call, again)
    assert outcome == "interrupted", "the place is passed"
    [answer] = pool.run(1, attempt, values(copy, "auto"))
    assert answer in ("resumed at 2", "resumed at 3")
    pool.run(1, train_until, values(copy, "auto"), 4)  # later saves work, and remove the leftovers
    assert pool.run(1, attempt, values(copy, "auto")) == ["resumed at 4"]
    assert not list((copy / "test" / "checkpoints").glob(".*"))


def record_calls(settings: dict[str, dict[str, Any]]) -> list[str]:
    """Save, and return the order of syncs and renames."""
    trainer = make_trainer(settings)
    trainer.train_step()
    seen: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def name(path: str) -> str:
        return path.partition("/checkpoints")[2].lstrip("/").replace(str(trainer.step), "N")

    def logged_fsync(descriptor: int) -> None:
        seen.append("sync " + name(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def logged_rename(source: Path, target: Path) -> None:
        seen.append(f"name {name(str(target))}")
        rename(source, target)

    def logged_replace(source: Path, target: Path) -> None:
        seen.append(f"name {name(str(target))}")
        replace(source, target)

    system: Any = os
    system.fsync, system.rename, system.replace = logged_fsync, logged_rename, logged_replace
    try:
        trainer.save()
        trainer.checkpointer.wait()
    finally:
        system.fsync, system.rename, system.replace = fsync, rename, replace
    trainer.close()
    files = [
        f"{p.relative_to(trainer.run_dir / 'checkpoints' / 'step-1')}"
        for p in (trainer.run_dir / "checkpoints" / "step-1").rglob("*")
        if p.is_file()
    ]
    committed_at = seen.index("name step-N")
    synced = {line.rpartition("/")[2].removeprefix(".").removesuffix(".partial") for line in seen[:committed_at]}
    missing = [file for file in files if Path(file).name not in synced]
    assert not missing, f"{missing} may not be on disk when the checkpoint has its name"
    return seen[committed_at:]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux which file was synced")
def test_every_file_is_on_disk_before_the_name_and_the_name_before_the_record(pool: WorkerPool, tmp_path: Path) -> None:
    [after] = pool.run(1, record_calls, values(tmp_path))
    assert after == ["name step-N", "sync ", "sync .latest.partial", "name latest", "sync "]

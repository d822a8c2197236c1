"""Files of conversations: formats are recognised, mistakes are named by file and line, every row counts once."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from femto_sft.rows import ConversationRows, read_manifest
from femto_sft.sources import find_sources
from tests.sft.making import log_of, refusal, rows_of, said, texts, write_lines

YES = said(("user", "say yes"), ("assistant", "yes"))
NO = said(("user", "say no"), ("assistant", "no"))
YES_TEXT = "<|im_start|>user\nsay yes<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
SAME = {
    "messages": YES,
    "conversations": {"conversations": [{"from": "human", "value": "say yes"}, {"from": "gpt", "value": "yes"}]},
    "conversations with roles": {"conversations": YES["messages"]},
    "instruction": {"instruction": "say yes", "input": "", "output": "yes"},
    "instruction without input": {"instruction": "say yes", "output": "yes"},
    "prompt": {"prompt": "say yes", "completion": "yes"},
    "prompt of messages": {"prompt": YES["messages"][:1], "completion": YES["messages"][1:]},
    "messages beside a prompt": {**YES, "prompt": "say yes", "prompt_id": "7"},
}


def counts(rows: ConversationRows) -> dict[str, Any]:
    found: dict[str, Any] = read_manifest(rows.directory)["counts"]
    return found


@pytest.mark.parametrize("row", SAME.values(), ids=SAME)
def test_every_format_is_recognised_by_its_keys_and_says_so(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", row))
    assert texts(rows) == [YES_TEXT]
    name = next(key for key in ("messages", "conversations", "instruction", "prompt") if key in row)
    assert f"(format {name}, recognised by its keys)" in log_of(rows, "a.jsonl")


def test_a_format_can_be_said_instead(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", {**NO, "prompt": "say yes", "completion": "yes"})
    assert texts(rows_of(tmp_path, file, format="prompt")) == [YES_TEXT]
    assert "needs" in refusal(tmp_path / "b", file, format="conversations")


def test_instruction_and_input_make_one_question_and_system_goes_first(tmp_path: Path) -> None:
    row = {"instruction": "say", "input": "yes", "output": "yes", "system": "be kind", "id": 3}
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", row), seq_len=128)
    assert texts(rows)[0].startswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nsay\n\nyes<|im_end|>")
    assert "keys not read: id" in log_of(rows, "a.jsonl")


def parquet(file: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), file)
    return file


def zipped(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_bytes(gzip.compress(b"\n".join(json.dumps(row).encode() for row in rows)))
    return file


def listed(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text(json.dumps(list(rows), indent=1))
    return file


def saved(folder: Path, *rows: dict[str, Any]) -> Path:
    datasets.Dataset.from_list(list(rows)).save_to_disk(str(folder))
    return folder


def saved_splits(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    made = {name: datasets.Dataset.from_list(rows, split=name) for name, rows in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return folder


def listed_behind_blank_lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("\ufeff\n  \n" + json.dumps(list(rows)))
    return file


def a_folder(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    write_lines(folder / "b.jsonl", rows[1])
    parquet(folder / "c.parquet", *rows[2:])
    write_lines(folder / "a.jsonl", rows[0])
    (folder / "README.md").write_text("not data")
    return folder


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_lines, "a.jsonl"),
        (zipped, "a.jsonl.gz"),
        (listed, "a.json"),
        (listed_behind_blank_lines, "a.json"),
        (parquet, "a.parquet"),
        (saved, "saved"),
        (a_folder, "folder"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_of_every_kind_hold_the_same_conversations(tmp_path: Path, write: Callable[..., Path], name: str) -> None:
    path = write(tmp_path / name, YES, NO, YES)
    rows = rows_of(tmp_path, path, packing="pad")
    assert texts(rows) == [YES_TEXT, YES_TEXT.replace("yes", "no"), YES_TEXT]
    assert counts(rows)["read"] == counts(rows)["kept"] == 3


def test_a_parquet_file_of_one_row_group_is_read_page_by_page(tmp_path: Path) -> None:
    talks = [said(("user", "say yes"), ("assistant", f"{i} " * 2000)) for i in range(2048)]
    options = {"use_dictionary": False, "compression": "none", "write_batch_size": 32}
    pq.write_table(pa.Table.from_pylist(talks), tmp_path / "a.parquet", **options)
    del talks
    [source] = find_sources((str(tmp_path / "a.parquet"),), "train")
    before = pa.total_allocated_bytes()
    most = max(pa.total_allocated_bytes() - before for _ in source.lines())
    assert most < (tmp_path / "a.parquet").stat().st_size / 2


def test_a_hugging_face_name_is_asked_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, subset: str | None, split: str) -> Any:
        asked.append((path, subset, split))
        return datasets.Dataset.from_list([YES])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts(rows_of(tmp_path, "someone/talks:small", split="test")) == [YES_TEXT]
    assert asked == [("someone/talks", "small", "test")]


def test_a_dataset_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "cannot be read (no network at all); check the spelling" in refusal(tmp_path, "someone/talks")


# Mistakes in a line.

FAULTS: dict[str, tuple[bytes | str | dict[str, Any], str]] = {
    "trailing data": (json.dumps(YES) + " {}", "line 2: trailing data after its object"),
    "invalid UTF-8": (b'{"messages": "\xff"}', "line 2: byte 15 is not valid UTF-8"),
    "no JSON": ("messages: yes", "line 2: not valid JSON (Expecting value"),
    "no object": ("[1, 2]", "line 2: holds a list, not a JSON object"),
    "other keys": ({"text": "yes"}, "line 2: no 'messages' among its keys ('text')"),
    "no list": ({"messages": "yes"}, "line 2: 'messages' holds a str, not a list of turns"),
    "no turn": ({"messages": ["yes"]}, "line 2: messages[0] holds a str, not a turn"),
    "no role": ({"messages": [{"content": "yes"}]}, "line 2: messages[0] has neither 'role' nor 'from'"),
    "unknown role": (said(("nobody", "yes")), "line 2: messages[0] has the role 'nobody'"),
    "no content": ({"messages": [{"role": "user"}]}, "line 2: messages[0] has no 'content'"),
    "content of parts": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "line 2: messages[0].content holds a list, not text",
    ),
    "half a surrogate": (said(("user", "\ud800")), "line 2: messages[0].content holds half of a surrogate pair"),
    "begins with the assistant": (said(("assistant", "yes")), "line 2: it begins with the assistant"),
}


@pytest.mark.parametrize(("line", "words"), FAULTS.values(), ids=FAULTS)
def test_a_malformed_line_is_refused_by_file_and_line(tmp_path: Path, line: Any, words: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES, line, NO)
    text = refusal(tmp_path, file)
    assert text.startswith(f"{file}, {words}")
    assert text.endswith("correct it, or set --sft.malformed skip")


@pytest.mark.parametrize(("line", "words"), FAULTS.values(), ids=FAULTS)
def test_or_skipped_counted_and_reported(tmp_path: Path, line: Any, words: str) -> None:
    file = write_lines(tmp_path / "a.jsonl", YES, line, NO)
    rows = rows_of(tmp_path, file, malformed="skip")
    assert len(rows.documents(0)) == 2
    assert counts(rows)["malformed"] == 1
    assert f"1 malformed rows skipped, the first of them {file}, {words}" in log_of(rows, file)


def test_an_empty_first_document_and_blank_lines_are_counted_not_crashed_on(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", {"messages": []}, "", YES, "  ", "{}", NO, ""))
    found = counts(rows)
    assert (found["read"], found["blank"], found["nothing_to_learn"], found["kept"]) == (4, 3, 2, 2)
    log = log_of(rows, "a.jsonl")
    assert "2 conversations left out: nothing in them to learn" in log
    assert "3 blank lines skipped" in log


def test_every_conversation_is_counted_once(tmp_path: Path) -> None:
    long = said(("user", "x" * 99), ("assistant", "yes"))
    lines: list[Any] = [YES, "", "{", NO, long, said(("user", "say yes")), {"messages": []}, YES]
    found = counts(rows_of(tmp_path, write_lines(tmp_path / "a.jsonl", *lines), malformed="skip"))
    left_out = found["malformed"] + found["nothing_to_learn"] + found["dropped"]
    assert found["read"] == found["kept"] + left_out == 7
    assert (found["malformed"], found["nothing_to_learn"], found["overlong"], found["kept"]) == (1, 2, 1, 3)


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(YES).encode())
    assert texts(rows_of(tmp_path, file)) == [YES_TEXT]


# Mistakes in a file.


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.csv", b"prompt,completion\n", "a.csv is in an unknown format; give .jsonl"),
        ("a.jsonl", b'{"text": "yes"}', "line 1: the keys 'text' match no known format (messages: messages;"),
        ("a.jsonl", b"", "nothing to train on: none of 0 rows"),
        ("a.jsonl", b'{"messages": []}', "(1 conversations left out: nothing in them to learn)"),
        ("a.json", b"[1, 2", "begins as a list, but is not valid JSON"),
        ("a.json", b'["\xff"]', "line 1: not valid UTF-8"),
        ("a.jsonl.gz", gzip.compress(b'{"messages": []}\n' * 9, mtime=0)[:-9], "cannot be read to its end"),
        ("a.jsonl.gz", b"no archive", "cannot be read to its end"),
        ("a.parquet", b"PAR1", "cannot be read as Parquet"),
    ],
    ids=["csv", "text", "empty", "no messages", "json", "latin-1", "cut short", "no archive", "parquet"],
)
def test_a_file_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, name: str, data: bytes, words: str
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    assert words in refusal(tmp_path, file)


def test_paths_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "does not exist" in refusal(tmp_path, tmp_path / "nowhere.jsonl")
    assert "does not exist" in refusal(tmp_path, tmp_path / "nowhere")
    assert "has no file that ends in one of" in refusal(tmp_path, tmp_path / "empty")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_split_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = saved_splits(tmp_path / "both", train=[YES], held=[NO])
    assert f"sft.split = 'test' is none of the splits of {folder}: train, held" in refusal(
        tmp_path, folder, split="test"
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_dataset_saved_with_its_splits_is_read_by_split(tmp_path: Path) -> None:
    folder = saved_splits(tmp_path / "both", train=[YES, YES], held=[NO])
    assert texts(rows_of(tmp_path, folder)) == [YES_TEXT] * 2
    assert texts(rows_of(tmp_path, folder, split="held")) == [YES_TEXT.replace("yes", "no")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_split_of_a_dataset_saved_without_any_is_refused_unless_it_is_its_own(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", YES)
    words = f"sft.split = 'test', but the dataset saved in {folder} has no splits; leave sft.split out"
    assert refusal(tmp_path, folder, split="test") == words
    own = saved_splits(tmp_path / "both", test=[YES]) / "test"
    assert texts(rows_of(tmp_path, own, split="test")) == texts(rows_of(tmp_path, own)) == [YES_TEXT]

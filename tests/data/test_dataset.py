"""The file of rows: what the writer writes, what the reader returns, and which files it refuses."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from femto_core.errors import UserError
from femto_data.dataset import FORMAT, PackedDataset, RowWriter
from femto_data.tokenizer import saved_tokenizer_fingerprint, tokenizer_fingerprint


def write(file: Path, *parts: npt.NDArray[np.int64], seq_len: int = 4, vocab_size: int = 100) -> RowWriter:
    with RowWriter(
        file, seq_len=seq_len, vocab_size=vocab_size, tokenizer_fingerprint="0123456789abcdef", eos_id=3
    ) as writer:
        for part in parts:
            writer.append(part)
    return writer


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of the 5 rows of tokens 0..20, seq_len 4."""
    write(tmp_path / "train.safetensors", np.arange(21))
    return tmp_path / "train.safetensors"


def tokenizer(words: tuple[str, ...] = ("a", "b", "c"), eos: str = "a") -> PreTrainedTokenizerBase:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-1]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made: PreTrainedTokenizerBase = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=eos
    )
    return made


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30), max_size=6),
    seq_len=st.integers(1, 9),
    vocab_size=st.sampled_from([300, 65536, 65537]),
)
def test_rows_are_the_slices_of_the_stream_however_it_was_cut_into_appends(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], seq_len: int, vocab_size: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "slices.safetensors"
    stream = np.random.default_rng(sum(sizes)).integers(0, vocab_size, sum(sizes))
    writer = write(file, *np.split(stream, np.cumsum(sizes)[:-1]), seq_len=seq_len, vocab_size=vocab_size)
    expected = [stream[start : start + seq_len + 1].tolist() for start in range(0, len(stream) - seq_len, seq_len)]
    assert writer.rows == len(expected)
    covered = len(expected) * seq_len + 1 if expected else 0
    assert writer.dropped_tokens == len(stream) - covered < seq_len + 1
    if expected:
        dataset = PackedDataset(file)
        assert [dataset[i].tolist() for i in range(len(dataset))] == expected
        assert all(row[0] == before[-1] for before, row in itertools.pairwise(expected))


def test_a_row_is_int64_and_its_own_memory(file: Path) -> None:
    dataset = PackedDataset(file)
    row = dataset[1]
    assert row.dtype == torch.int64
    assert row.tolist() == [4, 5, 6, 7, 8]
    row.zero_()
    assert dataset[1].tolist() == [4, 5, 6, 7, 8]
    assert [int(dataset[i][0]) for i in range(len(dataset))] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, torch.uint16), (65537, torch.int32)])
def test_safetensors_reads_the_file_and_the_largest_id_survives(tmp_path: Path, vocab_size: int, dtype: object) -> None:
    file = tmp_path / "train.safetensors"
    write(file, np.full(9, vocab_size - 1), vocab_size=vocab_size)
    assert PackedDataset(file).largest_id() == vocab_size - 1
    with safe_open(file, framework="pt") as opened:
        assert list(opened.keys()) == ["rows"]
        assert opened.get_tensor("rows").dtype == dtype
        assert opened.get_slice("rows").get_shape() == [2, 5]
        metadata = opened.metadata()
        assert len(metadata.pop("id")) == 32
        assert metadata == {
            "format": "femto-rows-3",
            "seq_len": "4",
            "vocab_size": str(vocab_size),
            "tokenizer": "0123456789abcdef",
            "eos_id": "3",
        }
    assert PackedDataset(file)[1].tolist() == [vocab_size - 1] * 5


def test_the_header_ends_on_a_multiple_of_eight(file: Path) -> None:
    assert struct.unpack("<Q", file.read_bytes()[:8])[0] % 8 == 0


def test_attributes_come_from_the_file(file: Path) -> None:
    dataset = PackedDataset(file)
    assert (len(dataset), dataset.seq_len, dataset.vocab_size, dataset.eos_id) == (5, 4, 100, 3)
    assert dataset.tokenizer_fingerprint == "0123456789abcdef"
    assert dataset.tokenizer_path == file.parent / "tokenizer"


@pytest.mark.parametrize("index", [-1, 5, 10**9])
def test_an_index_outside_the_rows_is_an_index_error(file: Path, index: int) -> None:
    with pytest.raises(IndexError, match=f"row {index} of .*rows 0 to 4"):
        PackedDataset(file)[index]


def test_numpy_indices_work_and_floats_do_not(file: Path) -> None:
    dataset = PackedDataset(file)
    assert dataset[np.int64(2)].tolist() == [8, 9, 10, 11, 12]  # type: ignore[call-overload, index, unused-ignore]
    with pytest.raises(TypeError):
        dataset[1.0]  # type: ignore[index]


def test_it_pickles_as_its_path(file: Path) -> None:
    dataset = PackedDataset(file)
    dataset[0]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 300
    assert pickle.loads(pickled)[3].tolist() == dataset[3].tolist()


def test_a_spawned_process_reads_the_same_row(file: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(PackedDataset(file).__getitem__, (2,)).tolist() == [8, 9, 10, 11, 12]


def refusal(file: Path) -> str:
    with pytest.raises(UserError) as caught:
        PackedDataset(file)
    text = str(caught.value)
    assert text.startswith(str(file))
    assert "\n" not in text
    return text


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist; give the train.safetensors" in refusal(tmp_path / "none.safetensors")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory, not a file of rows" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"short", b"{}", b"PK\x03\x04" * 50, b"\x00" * 64, struct.pack("<Q", 2) + b"{"]
)
def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "train.safetensors"
    file.write_bytes(content)
    assert "is not a safetensors file, or only the beginning of one" in refusal(file)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"format": FORMAT}, {"format": "femto-rows-1"}])
def test_a_foreign_safetensors_file_is_refused(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    file = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"rows": np.zeros((2, 5), np.uint16)}, file, metadata)
    assert "holds no rows in the format femto-rows-3" in refusal(file)


@pytest.mark.parametrize("change", [{"seq_len": "5"}, {"seq_len": "four"}, {"eos_id": None}])
def test_metadata_that_belies_the_tensor_is_refused(file: Path, change: dict[str, str | None]) -> None:
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"].update(change)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    assert "holds no rows in the format femto-rows-3" in refusal(file)


@pytest.mark.parametrize("lost", [1, 2, 50])
def test_a_file_cut_in_its_rows_is_refused_as_truncated(file: Path, lost: int) -> None:
    file.write_bytes(file.read_bytes()[:-lost])
    assert f"is truncated: its header promises 50 bytes of rows, but it has {50 - lost};" in refusal(file)


def test_a_file_cut_at_any_byte_is_refused(file: Path) -> None:
    data = file.read_bytes()
    for size in range(len(data)):
        file.write_bytes(data[:size])
        refusal(file)


def test_a_file_with_more_than_its_rows_is_refused_as_damaged(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\x00")
    assert "is damaged" in refusal(file)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "train.safetensors"
    assert write(file, np.arange(4)).dropped_tokens == 4
    assert "holds no rows; preprocess more text or take a smaller seq_len" in refusal(file)


def test_an_exception_while_writing_leaves_no_file_and_the_old_one_alone(file: Path) -> None:
    before = file.read_bytes()
    with pytest.raises(ValueError, match="do not fit"):
        write(file, np.arange(9), np.array([-1]))
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before


@pytest.mark.parametrize("bad", [-1, 100, 70000])
def test_an_id_outside_the_vocabulary_is_never_written(tmp_path: Path, bad: int) -> None:
    with pytest.raises(ValueError, match="do not fit a vocabulary of 100"):
        write(tmp_path / "train.safetensors", np.array([1, bad]))
    assert list(tmp_path.iterdir()) == []


def test_the_fingerprint_ignores_directory_padding_truncation_and_use(tmp_path: Path) -> None:
    one = tokenizer()
    one.save_pretrained(tmp_path / "x")
    before = tokenizer_fingerprint(one)
    one(["a b c", "a"], truncation=True, max_length=2)
    one(["a"], split_special_tokens=True)
    assert tokenizer_fingerprint(one) == before == tokenizer_fingerprint(tokenizer())
    assert len(before) == 16
    assert int(before, 16) >= 0
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path / "x")
    again.save_pretrained(tmp_path / "y")
    again.backend_tokenizer.enable_truncation(2)
    assert tokenizer_fingerprint(again) == tokenizer_fingerprint(
        PreTrainedTokenizerFast.from_pretrained(tmp_path / "y")
    )


def test_the_fingerprint_changes_with_the_vocabulary_its_order_and_eos() -> None:
    made = [tokenizer(), tokenizer(("a", "b", "d", "c")), tokenizer(("a", "c", "b")), tokenizer(eos="b")]
    assert len({tokenizer_fingerprint(one) for one in made}) == 4


@pytest.mark.parametrize(
    ("part", "made", "counts"),
    [
        ("normalizer", normalizers.Lowercase(), True),
        ("pre_tokenizer", pre_tokenizers.Digits(), True),
        ("post_processor", processors.TemplateProcessing(single="a $A", special_tokens=[("a", 0)]), True),
        ("decoder", decoders.WordPiece(), False),
    ],
)
def test_of_the_backend_only_what_decides_ids_enters_the_fingerprint(part: str, made: Any, counts: bool) -> None:
    one = tokenizer()
    setattr(one.backend_tokenizer, part, made)
    assert (tokenizer_fingerprint(one) != tokenizer_fingerprint(tokenizer())) is counts


def test_an_added_token_enters_the_fingerprint_and_the_padding_token_and_a_chat_template_do_not() -> None:
    one = tokenizer()
    one.pad_token, one.chat_template = "b", "{{ messages }}"
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(tokenizer())
    one.add_tokens(["e"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(tokenizer())


def test_a_saved_tokenizer_has_the_fingerprint_it_had_also_beside_a_models_config(tmp_path: Path) -> None:
    assert saved_tokenizer_fingerprint(tmp_path) is None
    tokenizer().save_pretrained(tmp_path)
    assert saved_tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(tokenizer())
    LlamaConfig().save_pretrained(tmp_path)
    assert saved_tokenizer_fingerprint(tmp_path) == tokenizer_fingerprint(tokenizer())

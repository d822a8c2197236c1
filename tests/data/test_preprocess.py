"""Text to rows: the rows and counts, their reproducibility, and the error sentence of every refused input."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from femto_core.errors import UserError
from femto_data.dataset import PackedDataset
from femto_data.tokenizer import tokenizer_fingerprint
from femto_data.workspace import Interrupted
from tests.data.making import TEXTS, contents, decoded, jsonl, refusal, rows, run, sliced, stream, texts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return texts(tmp_path / "docs.jsonl", *TEXTS)


def test_every_row_is_its_slice_of_the_stream(tmp_path: Path, source: Path) -> None:
    manifest = run(tmp_path, source)
    ids = stream(tmp_path / "out", TEXTS)
    assert rows(tmp_path / "out") == sliced(ids, 8)
    assert manifest.documents == len(TEXTS) == ids.count(PackedDataset(tmp_path / "out/train.safetensors").eos_id)
    assert manifest.tokens == len(ids)
    assert manifest.rows_train == (len(ids) - 1) // 8
    assert manifest.dropped_tokens == len(ids) - (manifest.rows_train * 8 + 1)


def test_decoding_the_rows_gives_the_text_back(tmp_path: Path, source: Path) -> None:
    run(tmp_path, source, seq_len=1)
    assert decoded(tmp_path / "out") == "<|endoftext|>".join(TEXTS)


@pytest.mark.parametrize("held_out", [0.0, 0.3])
def test_the_output_is_the_same_to_the_byte_for_any_number_of_workers(
    tmp_path: Path, source: Path, held_out: float
) -> None:
    made = []
    for workers in (1, 2, 3):
        output = tmp_path / f"out{workers}"
        run(tmp_path, source, workers=workers, output=str(output), held_out=held_out)
        made.append(contents(output))
    assert "train.safetensors" in made[0]
    assert made[0] == made[1] == made[2]


def test_more_workers_than_documents(tmp_path: Path) -> None:
    assert run(tmp_path, texts(tmp_path / "one.jsonl", "one document " * 9), workers=4).documents == 1


def test_another_interpreter_with_another_hash_seed_makes_the_same_dataset(tmp_path: Path, source: Path) -> None:
    script = (
        "import sys; from femto_data.preprocess import PreprocessConfig, preprocess\n"
        f"config = PreprocessConfig(input=({str(source)!r},), seq_len=8, vocab_size=400, output=sys.argv[1])\n"
        "preprocess(config, quiet=True)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "other")], env=environment, check=True)
    run(tmp_path, source, vocab_size=400)
    assert contents(tmp_path / "other") == contents(tmp_path / "out")


def test_the_manifest_and_the_rows_name_the_same_tokenizer(tmp_path: Path, source: Path) -> None:
    manifest = run(tmp_path, source)
    dataset = PackedDataset(tmp_path / "out/train.safetensors")
    assert json.loads((tmp_path / "out/manifest.json").read_text()) == json.loads(json.dumps(attrs.asdict(manifest)))
    fingerprint = tokenizer_fingerprint(AutoTokenizer.from_pretrained(dataset.tokenizer_path))
    assert manifest.tokenizer == dataset.tokenizer_fingerprint == fingerprint
    assert [one.name for one in manifest.sources] == [str(source)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "sources.jsonl",
        "tokenizer",
        "train.safetensors",
    ]


def test_held_out_documents_are_chosen_by_index_and_seed_and_are_in_no_training_row(tmp_path: Path) -> None:
    documents = [f"document {i} {'x' * i}" for i in range(60)]
    source = texts(tmp_path / "docs.jsonl", *documents)
    chosen = []
    for seed in (0, 0, 1):
        manifest = run(tmp_path, source, held_out=0.25, seed=seed, seq_len=1)
        parts = [decoded(tmp_path / "out", name).split("<|endoftext|>") for name in ("train", "held_out")]
        assert sorted(parts[0] + parts[1]) == sorted(documents)
        assert 5 <= len(parts[1]) <= 27
        assert (manifest.rows_train, manifest.rows_held_out) == tuple(
            len(rows(tmp_path / "out", name)) for name in ("train", "held_out")
        )
        assert manifest.dropped_tokens == 0
        chosen.append(parts[1])
    assert chosen[0] == chosen[1] != chosen[2]


def test_held_out_rows_too_few_for_one_are_refused(tmp_path: Path) -> None:
    words = refusal(tmp_path, texts(tmp_path / "docs.jsonl", "a document " * 9), held_out=0.001)
    assert words.startswith("the held-out documents have 0 tokens, too few for one row of seq_len + 1 = 9")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory = tmp_path_factory.mktemp("trained")
    run(directory, texts(directory / "docs.jsonl", *TEXTS), vocab_size=320)
    made = AutoTokenizer.from_pretrained(directory / "out/tokenizer")
    assert isinstance(made, PreTrainedTokenizerFast)
    return made


@settings(max_examples=300, deadline=None)
@given(text=st.text() | st.text(alphabet=" \t\n\r\u00a0\u2028.,!?'ab"))
def test_the_trained_tokenizer_gives_any_text_back_exactly(trained: PreTrainedTokenizerFast, text: str) -> None:
    assert trained.decode(trained(text)["input_ids"]) == text


def test_the_trained_tokenizer_has_the_size_asked_for_and_learned_merges(trained: PreTrainedTokenizerFast) -> None:
    assert len(trained) <= 320
    assert len(trained) > 257
    assert trained.eos_token == "<|endoftext|>"


# Formats --------------------------------------------------------------------------------------------------------------


def zstd(data: bytes) -> bytes:
    """One Zstandard frame."""
    packed = pa.compress(data, codec="zstd", asbytes=True)
    assert isinstance(packed, bytes)
    return packed


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    documents = [text for text in TEXTS if text.strip()]
    plain = texts(tmp_path / "docs.jsonl", *documents)
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    half = plain.read_bytes().rindex(b"\n", 0, 900) + 1
    frames = [zstd(plain.read_bytes()[:half]), zstd(plain.read_bytes()[half:])]
    (tmp_path / "docs.jsonl.zst").write_bytes(b"".join(frames))
    pq.write_table(pa.table({"other": range(len(documents)), "text": documents}), tmp_path / "docs.parquet")
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for i, document in enumerate(documents):
        (folder / ("deep" if i < 4 else ".") / f"{i + 100}.txt").write_bytes(document.encode())
    ordered = [file.read_bytes().decode() for file in sorted(folder.rglob("*.txt"))]
    assert sorted(ordered) == sorted(documents)
    again = texts(tmp_path / "again.ndjson", *ordered)
    made = {}
    for source in (
        plain,
        tmp_path / "docs.jsonl.gz",
        tmp_path / "docs.jsonl.zst",
        tmp_path / "docs.parquet",
        folder,
        again,
    ):
        run(tmp_path, source, output=str(tmp_path / "out"))
        made[source.name] = rows(tmp_path / "out")
    assert made["docs.jsonl"] == made["docs.jsonl.gz"] == made["docs.jsonl.zst"] == made["docs.parquet"]
    assert made["folder"] == made["again.ndjson"]


def test_sources_are_read_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("first document\n" * 3)
    (tmp_path / "a.py").write_text("second = 2\n" * 3)
    run(tmp_path, tmp_path / "b.txt", tmp_path / "a.py", seq_len=1)
    assert decoded(tmp_path / "out") == "first document\n" * 3 + "<|endoftext|>" + "second = 2\n" * 3


def test_a_directory_gives_what_its_glob_matches_and_jsonl_in_it_is_read_as_such(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    texts(folder / "a.jsonl", "one document", "two documents")
    (folder / "b.rst").write_text("three documents")
    (folder / "c.bin").write_bytes(b"\xff\xff")
    assert run(tmp_path, folder, glob="*.[jr]s*").documents == 3


def test_a_byte_order_mark_is_not_text_and_line_endings_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\nthree\r\n")
    source = jsonl(tmp_path / "b.jsonl", b'\xef\xbb\xbf{"text": "four five"}\r', b'{"text": "six"}\r')
    run(tmp_path, tmp_path / "a.txt", source, seq_len=1)
    assert decoded(tmp_path / "out") == "one\r\ntwo\r\nthree\r\n<|endoftext|>four five<|endoftext|>six"


def test_a_line_separator_inside_a_string_is_not_the_end_of_a_line(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", '{"text": "one\u2028two\x85three four"}')
    assert run(tmp_path, source, seq_len=2).documents == 1


def test_blank_lines_are_skipped_and_empty_documents_skipped_and_counted(tmp_path: Path) -> None:
    source = jsonl(
        tmp_path / "a.jsonl", {"text": ""}, "", "  ", {"text": " \n"}, {"text": "some document of text"}, "", ""
    )
    manifest = run(tmp_path, source, seq_len=2)
    assert (manifest.documents, manifest.empty_documents) == (1, 2)
    assert manifest.tokens == len(stream(tmp_path / "out", ["some document of text"]))


def test_another_text_key(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "a.jsonl", {"text": 5, "content": "some document of text"})
    assert run(tmp_path, source, text_key="content", seq_len=2).documents == 1


# Refusals of input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"} {"text": "b"}', "trailing data after its object; every line must hold one JSON object"),
        ('{"text": "a"}garbage', "trailing data after its object"),
        ('{"text": "a"', "not valid JSON (Expecting"),
        ("garbage", "not valid JSON (Expecting value"),
        ("[" * 100_000, "not valid JSON"),
        ('{"text": ' + "9" * 5000 + "}", "'text' holds" if sys.version_info < (3, 10, 7) else "not valid JSON"),
        (b'{"text": "a\xffb"}', "byte 12 is not valid UTF-8; every line must hold one JSON object in UTF-8"),
        ('["text"]', "holds a list, not a JSON object"),
        ('"text"', "holds a str, not a JSON object"),
        ('{"content": "a", "id": 1}', "no 'text' among the keys 'content', 'id'; name the text's by --text-key"),
        ('{"text": null}', "'text' holds null, not text"),
        ('{"text": ["a"]}', "'text' holds [\"a\"], not text"),
        ('{"text": "\\ud800"}', "'text' holds half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_bad_line_is_refused_by_file_and_line(tmp_path: Path, name: str, line: bytes | str, words: str) -> None:
    file = jsonl(tmp_path / name, {"text": "good"}, "", line, {"text": "good"})
    if not name.endswith(".jsonl"):
        file.write_bytes({".gz": gzip.compress, ".zst": zstd}[file.suffix](file.read_bytes()))
    text = refusal(tmp_path, file)
    assert text.startswith(f"{file}, line 3: ")
    assert words in text


def test_a_bad_line_far_into_the_second_file_is_refused_before_anything_is_written(
    tmp_path: Path, source: Path
) -> None:
    bad = texts(tmp_path / "bad.jsonl", *(["fine"] * 3000))
    with bad.open("a") as handle:
        handle.write("\n{")
    assert refusal(tmp_path, source, bad, workers=2).startswith(f"{bad}, line 3001: ")


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: b"plain", lambda data: data[:20] + b"\0" * 9])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(spoil(gzip.compress(b'{"text": "some text"}\n' * 50)))
    assert refusal(tmp_path, file).startswith(f"{file} cannot be read to its end (")


@pytest.mark.parametrize("spoil", [lambda data: data[:-9], lambda data: b"plain", lambda data: data[:20] + b"\0" * 9])
def test_a_damaged_zstandard_file_is_refused(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "a.jsonl.zst"
    file.write_bytes(spoil(zstd(b"".join(b'{"text": "some text %d"}\n' % i for i in range(500)))))
    assert refusal(tmp_path, file).startswith(f"{file} cannot be read to its end (")


def test_invalid_utf8_in_a_text_file_is_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xe9e\nfour")
    assert refusal(tmp_path, tmp_path) == f"{tmp_path}/a.txt, line 3: not valid UTF-8; correct the file or leave it out"


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no")
    assert f"{tmp_path}/a.parquet cannot be read as Parquet (" in refusal(tmp_path, tmp_path / "a.parquet")


def test_a_parquet_file_without_the_column_and_one_with_a_null_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), file)
    assert refusal(tmp_path, file).startswith(f"{file}: no 'text' among the keys 'body', 'id'; name")
    pq.write_table(pa.table({"text": ["a", None]}), file)
    assert refusal(tmp_path, file).startswith(f"{file}, row 2: 'text' holds null, not text")


@pytest.mark.parametrize("name", ["none.jsonl", "no/such/file.txt", "/no/such/directory", "./none"])
def test_an_input_that_does_not_exist_is_refused(tmp_path: Path, name: str) -> None:
    assert refusal(tmp_path, name) == f"input {name} does not exist; check its spelling"


def test_a_directory_without_a_matching_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.rst").write_text("text")
    words = f"directory {tmp_path} has no file that matches '**/*.txt'; give another pattern with --glob"
    assert refusal(tmp_path, tmp_path) == words


def test_a_glob_that_is_none_is_refused(tmp_path: Path) -> None:
    assert "is not a pattern for files below a directory" in refusal(tmp_path, tmp_path, glob="")


@pytest.mark.parametrize("name", ["a.docx", "a.csv", "a", "a.txt.gz"])
def test_a_format_that_is_not_read_is_refused_with_those_that_are(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("some text")
    text = refusal(tmp_path, tmp_path / name)
    assert text.startswith(f"{tmp_path / name} is in an unknown format; give .jsonl, ")
    assert all(known in text for known in (".jsonl.gz", ".parquet", ".txt", ".py", "--glob"))


@pytest.mark.parametrize("content", ["", "\n\n \n"])
def test_a_file_without_a_document_is_refused(tmp_path: Path, content: str) -> None:
    file = jsonl(tmp_path / "a.jsonl", content)
    assert refusal(tmp_path, file) == f"{file} holds no document; give input with text in it"


def test_documents_that_are_all_empty_are_refused(tmp_path: Path) -> None:
    file = texts(tmp_path / "a.jsonl", "", " ", "\n")
    assert refusal(tmp_path, file) == f"all 3 documents of {file} are empty; give input with text in it"


def test_too_few_tokens_for_one_row_are_refused_and_just_enough_are_not(tmp_path: Path) -> None:
    file = texts(tmp_path / "a.jsonl", "abcdefg")
    words = "the train documents have 8 tokens, too few for one row of seq_len + 1 = 9; give more text"
    assert refusal(tmp_path, file, vocab_size=257).startswith(words)
    assert run(tmp_path, texts(file, "abcdefgh"), vocab_size=257).rows_train == 1


# Hugging Face datasets ------------------------------------------------------------------------------------------------


class Hub:
    """A stand-in for Hugging Face: every name is the same dataset, at one commit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.texts = ["one document", "another document"]
        self.sha = "c0ffee"
        monkeypatch.setattr(datasets, "load_dataset", self.load)
        monkeypatch.setattr(huggingface_hub, "dataset_info", self.info)

    def info(self, path: str) -> Hub:
        return self

    def load(
        self, path: str, name: str | None, *, split: str, streaming: bool, revision: str
    ) -> Iterator[dict[str, str]]:
        self.asked.append((path, name, split, streaming, revision))
        return iter([{"text": text} for text in self.texts])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    return Hub(monkeypatch)


def test_a_hugging_face_dataset_is_streamed_once_by_name_config_and_commit(tmp_path: Path, hub: Hub) -> None:
    manifest = run(tmp_path, "someone/things:small", "things")
    assert manifest.documents == 4
    assert hub.asked == [
        ("someone/things", "small", "train", True, "c0ffee"),
        ("things", None, "train", True, "c0ffee"),
    ]
    assert [(one.name, one.revision) for one in manifest.sources] == [
        ("someone/things:small", "c0ffee"),
        ("things", "c0ffee"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_bad_row_of_a_hugging_face_dataset_is_refused_by_its_number(tmp_path: Path, hub: Hub) -> None:
    hub.texts.append(None)  # type: ignore[arg-type]
    assert refusal(tmp_path, "things").startswith("things, row 3: 'text' holds null, not text")


LOST = (
    "input someone/things is neither a file nor a directory, and the Hugging Face dataset of that name cannot be "
    "reached or read (Couldn't reach the hub); check the spelling and the network"
)


def lost(*_: object, **__: object) -> None:
    raise ConnectionError("Couldn't reach\nthe hub")


def test_a_hugging_face_dataset_that_cannot_be_reached_is_refused(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "dataset_info", lost)
    assert refusal(tmp_path, "someone/things") == LOST


def test_a_hugging_face_dataset_that_is_lost_on_the_way_is_fetched_by_the_next_run(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "load_dataset", lost)
        with pytest.raises(Interrupted) as caught:
            run(tmp_path, "someone/things", seq_len=2)
    assert str(caught.value) == f"{LOST}; run the command again to resume"
    assert run(tmp_path, "someone/things", seq_len=2).documents == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


# Tokenizers -----------------------------------------------------------------------------------------------------------


def words_tokenizer(directory: Path, *, eos: str | None = "<e>", limit: int | None = None) -> Path:
    """A tokenizer whose ids have a hole: seven words, the largest id 70000."""
    backend = Tokenizer(models.WordLevel({"<u>": 0, "<e>": 1, "a": 2, "b": 3, "big": 70000}, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if limit:
        backend.enable_truncation(limit)
        backend.enable_padding(length=limit)
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token=eos, unk_token="<u>", model_max_length=4
    ).save_pretrained(directory)
    return directory


def test_a_tokenizer_directory_is_used_with_ids_past_its_length_and_without_its_truncation(tmp_path: Path) -> None:
    source = texts(tmp_path / "a.jsonl", "a b big a b a a", "big big b")
    manifest = run(tmp_path, source, tokenizer=str(words_tokenizer(tmp_path / "words", limit=3)), seq_len=3)
    assert manifest.vocab_size == 70001
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/tokenizer")
    assert tokenizer_fingerprint(tokenizer) == manifest.tokenizer
    assert rows(tmp_path / "out") == sliced([2, 3, 70000, 2, 3, 2, 2, 1, 70000, 70000, 3, 1], 3)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path, source: Path) -> None:
    directory = words_tokenizer(tmp_path / "words", eos=None)
    words = f"tokenizer {directory} has no EOS token to end documents with; set its eos_token and save it again"
    assert refusal(tmp_path, source, tokenizer=str(directory)) == words


def test_a_tokenizer_that_is_not_there_or_damaged_is_refused(tmp_path: Path, source: Path) -> None:
    missing = str(tmp_path / "none")
    assert refusal(tmp_path, source, tokenizer=missing) == f"tokenizer {missing} does not exist; check its spelling"
    assert refusal(tmp_path, source, tokenizer=str(source)) == (
        f"tokenizer {source} is a file; give the directory that it stands in"
    )
    (tmp_path / "empty").mkdir()
    assert "empty holds no tokenizer (tokenizer.json); give a directory" in refusal(
        tmp_path, source, tokenizer=str(tmp_path / "empty")
    )
    directory = words_tokenizer(tmp_path / "words")
    (directory / "tokenizer.json").write_text('{"model": 1}')
    assert refusal(tmp_path, source, tokenizer=str(directory)).startswith(f"tokenizer {directory} cannot be loaded (")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff\xfe", b"[" * 100_000], ids=["list", "cut", "bytes", "deep"])
def test_a_damaged_file_of_a_tokenizer_is_named(tmp_path: Path, source: Path, name: str, content: bytes) -> None:
    directory = words_tokenizer(tmp_path / "words")
    (directory / name).write_bytes(content)
    assert refusal(tmp_path, source, tokenizer=str(directory)).startswith(f"{directory / name} is damaged")


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_of_a_tokenizer_is_never_run_nor_asked_for(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    directory = words_tokenizer(tmp_path / "words")
    mark = tmp_path / "mark"
    (directory / "code.py").write_text(
        f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast as T, PretrainedConfig as C\n"
    )
    classes = {"AutoConfig": "code.C", "AutoTokenizer": ["code.T", None]}
    (directory / "config.json").write_text(json.dumps({"model_type": "unheard-of", "auto_map": classes}))
    if where == "tokenizer_config.json":
        config = json.loads((directory / where).read_text())
        (directory / where).write_text(json.dumps({**config, "tokenizer_class": "T", "auto_map": classes}))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    if where == "config.json":  # the class of the tokenizer is one of transformers: nothing needs the code
        run(tmp_path, source, tokenizer=str(directory), seq_len=3)
    else:
        words = refusal(tmp_path, source, tokenizer=str(directory))
        assert "auto_map asks for code from the directory, which femto never runs" in words
    assert not mark.exists()


def test_a_tokenizer_that_the_hub_does_not_give_is_refused_after_one_question(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "model_info", lost)
    assert refusal(tmp_path, source, tokenizer="someone/words") == (
        "tokenizer someone/words is no directory, and the Hugging Face hub cannot be reached or has none of that name "
        "(Couldn't reach the hub); check the spelling and the network"
    )


def edited(directory: Path, **changes: object) -> str:
    """Change tokenizer.json, and return the directory's name."""
    file = directory / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return str(directory)


def test_an_id_that_no_model_has_is_refused(tmp_path: Path, source: Path) -> None:
    vocabulary = {"<u>": 0, "<e>": 1, "a": 2**31}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<u>"}
    directory = edited(words_tokenizer(tmp_path / "words"), model=model)
    assert refusal(tmp_path, source, tokenizer=directory) == (
        f"tokenizer {directory} gives a token the id 2147483648, but ids must lie below 16777216; correct it in "
        "tokenizer.json"
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_pattern_that_backtracks_for_ever_is_refused(tmp_path: Path, workers: int) -> None:
    source = texts(tmp_path / "a.jsonl", "a" * 200 + "b")
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    directory = edited(words_tokenizer(tmp_path / "words"), pre_tokenizer=split)
    words = refusal(tmp_path, source, tokenizer=directory, workers=workers)
    assert words.startswith(f"tokenising with the rules of tokenizer {directory} fails (Onig: Regex search error")


def test_rules_that_fill_the_memory_are_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("femto_data.limits.GIB", 0.01)
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    rules = {"type": "Sequence", "normalizers": [replace] * 3}
    directory = edited(words_tokenizer(tmp_path / "words"), normalizer=rules)
    words = refusal(tmp_path, source, tokenizer=directory)
    assert words == f"tokenising with the rules of tokenizer {directory} takes more than 0 GiB of memory"


# Settings and output --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_len": 0}, "--seq-len 0 is out of range; give a number from 1 to"),
        ({"workers": 0}, "--workers 0 is out of range; give a number from 1 to 256"),
        ({"workers": 500}, "--workers 500 is out of range; give a number from 1 to 256"),
        ({"seed": -1}, "--seed -1 is out of range; give a number from 0 to"),
        ({"vocab_size": 10**9}, "--vocab-size 1000000000 is out of range; give a number from 257 to 16777216"),
        ({"glob": "/etc/*.conf"}, "--glob /etc/*.conf is absolute; give a pattern for the files below each --input"),
        ({"held_out": 1.0}, "held_out = 1.0 is not a share of the documents"),
        ({"held_out": -0.1}, "held_out = -0.1 is not a share"),
        ({"held_out": float("nan")}, "held_out = nan is not a share"),
        ({"vocab_size": 256}, "--vocab-size 256 is out of range; give a number from 257 to"),
        ({"output": ""}, "output is empty; name the directory to write"),
        ({"weights": (0.5, 0.5)}, "2 weights for 1 inputs; give one for each, in the same order"),
        ({"weights": (0.0,)}, "weight 0.0 of "),
        ({"weights": (float("nan"),)}, "weight nan of "),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(
    tmp_path: Path, source: Path, changes: dict[str, object], words: str
) -> None:
    assert refusal(tmp_path, source, **changes).startswith(words)


def test_a_file_that_two_inputs_name_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(source)
    for other in (source, tmp_path / "link.jsonl", tmp_path):
        words = refusal(tmp_path, source, other, glob="docs.jsonl")
        assert words.startswith(f"--input names {source} twice ({source} and {other}); name it once, and use --weights")


@pytest.mark.parametrize("inputs", [(), ("",)])
def test_no_input_is_refused(tmp_path: Path, inputs: tuple[str, ...]) -> None:
    assert refusal(tmp_path, *inputs).startswith("input names nothing to read")


def test_an_output_below_a_file_is_refused(tmp_path: Path, source: Path) -> None:
    words = refusal(tmp_path, source, output=f"{source}/out")
    assert words.startswith(f"output {source}/out cannot be written (")


@pytest.mark.parametrize("manifest", [None, "{", "[]", '{"format": "other"}'])
def test_an_output_that_holds_something_else_is_refused(tmp_path: Path, source: Path, manifest: str | None) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    if manifest is not None:
        (tmp_path / "out/manifest.json").write_text(manifest)
    words = refusal(tmp_path, source)
    assert words.startswith(f"output {tmp_path}/out is not empty and holds no femto dataset; name another directory")


def test_an_output_that_is_a_file_is_refused(tmp_path: Path, source: Path) -> None:
    assert refusal(tmp_path, source, output=str(source)) == f"output {source} is a file; name a directory"


def test_an_empty_output_is_filled_and_an_earlier_dataset_replaced_whole(tmp_path: Path, source: Path) -> None:
    (tmp_path / "out").mkdir()
    run(tmp_path, source, held_out=0.3)
    assert (tmp_path / "out/held_out.safetensors").exists()
    run(tmp_path, source)
    assert not (tmp_path / "out/held_out.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "out"]


def test_a_refusal_leaves_the_earlier_dataset(tmp_path: Path, source: Path) -> None:
    run(tmp_path, source)
    assert "too few" in refusal(tmp_path, source, seq_len=10**6)


def test_a_failing_rename_puts_the_earlier_dataset_back(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, source)
    before = contents(tmp_path / "out")
    rename = os.replace

    def failing(old: Path, new: Path) -> None:
        if Path(old).name == "dataset":
            raise OSError("no")
        rename(old, new)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(UserError, match=r"out cannot be completed \(no\)"):
        run(tmp_path, source, seq_len=4)
    assert contents(tmp_path / "out") == before


def test_a_dataset_inside_its_own_input_directory_does_not_read_itself(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text of a document")
    first = run(tmp_path, tmp_path, seq_len=2)
    assert run(tmp_path, tmp_path, seq_len=2) == first


def test_nothing_is_written_but_the_output(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "home-cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    run(tmp_path, source, workers=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["docs.jsonl", "out"]


def test_the_settings_load_no_heavy_library() -> None:
    script = "import sys, femto_data.config; print({'torch', 'datasets', 'transformers'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"


def test_numpy_ids_of_a_batch_survive_documents_that_are_empty_at_its_edges(tmp_path: Path) -> None:
    documents = [""] * 300 + [f"document {i}" for i in range(300)] + [""] * 300
    run(tmp_path, texts(tmp_path / "a.jsonl", *documents), workers=2)
    assert rows(tmp_path / "out") == sliced(stream(tmp_path / "out", documents), 8)
    assert np.array(rows(tmp_path / "out")).shape[1] == 9

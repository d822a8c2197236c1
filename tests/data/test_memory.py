"""Memory does not grow with the input: a file larger than the remaining memory is preprocessed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 2**20
SIZE = 48 * MIB
ALLOWED = 20 * MIB

SCRIPT = """
import json, os, re, resource, sys
from femto_data import documents, shards
from femto_data.config import PreprocessConfig
from femto_data.preprocess import preprocess

shards.CHARACTERS = documents.LONGEST = 2**18
def make(name):
    return preprocess(PreprocessConfig(
        input=(name,), seq_len=128, output=name + ".rows", tokenizer=sys.argv[3], held_out=0.01 * name.endswith("l")
    ), quiet=True)

def peak():
    if sys.platform == "linux":  # ru_maxrss would include the memory of the parent process
        return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

make(sys.argv[1])  # start-up: libraries, their buffers, one input of the same kind
before = peak()
if sys.platform == "linux":
    data = int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (data + int(sys.argv[4]),) * 2)
manifest = make(sys.argv[2])
print(json.dumps([peak() - before, manifest.tokens]))
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fast tokenizer: words are long, and every word is unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"<u>": 0, "<e>": 1}, unk_token="<u>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directory = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<e>", unk_token="<u>"
    ).save_pretrained(directory)
    return directory


def write_one_row_group(file: Path, documents: list[str]) -> None:
    """Write Parquet's worst case: all rows in one row group, without compression."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    options = {"use_dictionary": False, "write_batch_size": 32}
    pq.write_table(pa.table({"text": documents}), file, len(documents), compression="none", **options)


@pytest.mark.parametrize("kind", ["jsonl", "txt", "parquet"])
def test_a_file_larger_than_the_memory_left_is_preprocessed(tmp_path: Path, words: Path, kind: str) -> None:
    line = "x" * 120 + " "
    document = line * 64
    unit, tokens = (line[:-1] + "\n", 1) if kind == "txt" else (json.dumps({"text": document}) + "\n", 65)
    for name, size in (("small", 4 * MIB), ("large", SIZE)):
        blocks = size // len(unit) // 256 + 1
        if kind == "parquet":
            write_one_row_group(tmp_path / f"{name}.parquet", [document] * 256 * blocks)
            continue
        with (tmp_path / f"{name}.{kind}").open("w") as stream:
            for _ in range(blocks):
                stream.write(unit * 256)
    names = [str(tmp_path / f"{name}.{kind}") for name in ("small", "large")]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names, str(words), str(ALLOWED)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    grown, found = json.loads(done.stdout)
    assert grown < ALLOWED < SIZE / 2 < (tmp_path / f"large.{kind}").stat().st_size
    assert found == tokens * (SIZE // len(unit) // 256 + 1) * 256 + (kind == "txt")

"""How fast documents become rows on one core: femto's tokenising beside a plain datasets.map of the same tokenizer.

    python -m benchmarks.packing

Both read the same JSON Lines, in a process of its own that is held to one core; the tokenizer is there already.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from sysconfig import get_paths
from typing import Any

DOCUMENTS = 1500
ROUNDS = 3


def prepare(folder: Path) -> None:
    """Write documents of the standard library, about 5 kB each, and a tokenizer trained on them."""
    from femto_data.config import PreprocessConfig
    from femto_data.corpus import standard_library_sources
    from femto_data.preprocess import preprocess

    text = "".join(file.read_text("utf-8") for file in standard_library_sources(Path(get_paths()["stdlib"])))
    with (folder / "docs.jsonl").open("w") as stream:
        for number in range(DOCUMENTS):
            stream.write(json.dumps({"text": text[number * 5000 : (number + 1) * 5000]}) + "\n")
    config = PreprocessConfig(input=(str(folder / "docs.jsonl"),), seq_len=512, output=str(folder / "first"))
    preprocess(config, quiet=True)


def femto(folder: Path) -> tuple[int, float]:
    """Return tokens and seconds of `femto preprocess`, from documents to finished rows."""
    from femto_data.config import PreprocessConfig
    from femto_data.preprocess import preprocess

    config = PreprocessConfig(
        input=(str(folder / "docs.jsonl"),),
        seq_len=512,
        output=str(folder / "rows"),
        tokenizer=str(folder / "first/tokenizer"),
    )
    start = time.perf_counter()
    return preprocess(config, quiet=True).tokens, time.perf_counter() - start


def plain_map(folder: Path) -> tuple[int, float]:
    """Return tokens and seconds of load_dataset and one map with the tokenizer, which makes no rows yet."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "first/tokenizer")

    def tokenise(batch: dict[str, list[str]]) -> dict[str, Any]:
        found = tokenizer(batch["text"], add_special_tokens=False)["input_ids"]
        return {"ids": [[*ids, tokenizer.eos_token_id] for ids in found]}

    start = time.perf_counter()
    loaded = datasets.load_dataset(
        "json", data_files=str(folder / "docs.jsonl"), split="train", cache_dir=tempfile.mkdtemp(dir=folder)
    )
    made = loaded.map(tokenise, batched=True, remove_columns=["text"])
    seconds = time.perf_counter() - start
    return sum(map(len, made["ids"])), seconds


def main() -> None:
    """Print the tokens a second of both, best of three rounds taken in turn."""
    if len(sys.argv) == 3:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        tokens, seconds = {"femto": femto, "map": plain_map}[sys.argv[1]](Path(sys.argv[2]))
        print(json.dumps([tokens, seconds]))
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        speeds: dict[str, list[float]] = {"femto": [], "map": []}
        counts = set()
        for _ in range(ROUNDS):
            for way, found in speeds.items():
                command = [sys.executable, "-m", "benchmarks.packing", way, name]
                tokens, seconds = json.loads(subprocess.check_output(command, text=True))
                found.append(tokens / seconds)
                counts.add(tokens)
        assert len(counts) == 1, f"the two ways made different numbers of tokens: {counts}"
        best = {way: max(found) for way, found in speeds.items()}
        for way, speed in best.items():
            print(f"{way:<6} {speed:>10,.0f} tokens/s on one core")
        print(f"femto is {best['femto'] / best['map']:.2f} times as fast")


if __name__ == "__main__":
    main()

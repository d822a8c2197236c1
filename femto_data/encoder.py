"""Pieces of documents to token ids, in this process or in worker processes that load only the tokenizer."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from femto_core.errors import UserError
from femto_data.limits import each_within_limits
from femto_data.workspace import Interrupted

_BATCH = 2**18  # characters per call of the tokenizers library, whose result takes many times their memory
_START = "import sys; sys.path[:] = {path!r}; from femto_data.encoder import serve; serve()"


class SlowTokenizer(Protocol):
    """A transformers tokenizer without a Rust backend."""

    def __call__(self, text: list[str], **options: Any) -> dict[str, list[list[int]]]:
        """Return `input_ids`, one list for each text, and other keys that are not used."""


class DocumentEncoder:
    """Encodes documents as plain text: special tokens spelled out in a document are split like other words.

    So a document that mentions "<|endoftext|>" does not end there.
    """

    def __init__(self, tokenizer: str | SlowTokenizer, name: str, *, batched: bool = True) -> None:
        """Take the description from tokenizers.Tokenizer.to_str, or a tokenizer without a Rust backend.

        `name` is what the user called it, for the sentence where it takes too much time or memory for a text.
        `batched` passes many texts to the tokenizers library at once, which then uses all cores. Worker processes
        encode one text at a time instead, or they would compete for the cores.
        """
        self._slow = None if isinstance(tokenizer, str) else tokenizer
        self._batched = batched
        self._what = f"tokenising with the rules of tokenizer {name}" if name else "tokenising"
        if isinstance(tokenizer, str):
            self._fast = Tokenizer.from_str(tokenizer)
            self._fast.encode_special_tokens = True
            self._fast.no_truncation()
            self._fast.no_padding()

    def __call__(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return each text's number of ids [texts], and the ids of all texts, concatenated [sum]."""
        lengths: list[int] = []
        ids: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
        # The rules of a tokenizer are somebody else's: a pattern can take for ever, a replacement fill the memory.
        for encoded in each_within_limits(map(self._encode, self._batches(texts)), self._what):
            for found in encoded:
                lengths.append(len(found))
                ids.append(np.asarray(found, np.int32))
        return np.asarray(lengths, np.int32), np.concatenate(ids)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self._slow is not None:  # verbose=True would warn about texts longer than the model's context
            options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
            return self._slow(texts, **options)["input_ids"]
        return [encoding.ids for encoding in self._fast.encode_batch_fast(texts, add_special_tokens=False)]

    def _batches(self, texts: Sequence[str]) -> list[list[str]]:
        if not self._batched:
            return [[text] for text in texts]
        batches: list[list[str]] = []
        size = _BATCH
        for text in texts:
            if size >= _BATCH:
                batches.append([])
                size = 0
            batches[-1].append(text)
            size += len(text)
        return batches


class TokenizerPool:
    """Worker processes that encode texts, each for one thread of this process at a time. A context manager.

    Each worker reads requests from a pipe and exits when the pipe closes, so no worker outlives this process.
    """

    def __init__(self, tokenizer: str | SlowTokenizer, name: str, workers: int) -> None:
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-c", _START.format(path=sys.path)]
        try:
            for _ in range(workers):
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._all.append(process)
                _send(process, (tokenizer, name))
                self._free.put(process)
        except BaseException:
            self.close()
            raise

    def __call__(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Encode as `DocumentEncoder` does, in the next free worker. Raises Interrupted if that worker exits."""
        process = self._free.get()
        try:
            _send(process, list(texts))
            assert process.stdout is not None
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise Interrupted(
                f"a tokenising process ended (exit code {process.wait()}), probably because memory ran out; run the "
                f"same command again with fewer --workers, and it resumes from the finished shards"
            ) from error
        finally:
            self._free.put(process)
        if isinstance(answer, BaseException):
            raise answer
        return cast("tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]", answer)

    def close(self) -> None:
        """Kill the worker processes."""
        for process in self._all:
            process.kill()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):  # unsent data for a worker that has exited
                    stream.close()
            process.wait()

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _send(process: subprocess.Popen[bytes], value: object) -> None:
    assert process.stdin is not None
    pickle.dump(value, process.stdin, protocol=5)
    process.stdin.flush()


def serve() -> None:
    """Encode the texts that arrive on standard input until it closes. The main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent handles it
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints must not mix with the answers
    with contextlib.suppress(EOFError, BrokenPipeError), answers:
        encoder = DocumentEncoder(*pickle.load(requests), batched=False)
        while True:
            texts = pickle.load(requests)
            answer: object
            try:
                answer = encoder(texts)
            except UserError as error:
                answer = error
            except Exception as error:  # noqa: BLE001 - raised again by the reader of the answer
                answer = RuntimeError(f"a tokenising process failed: {type(error).__name__}: {error}")
            pickle.dump(answer, answers, protocol=5)
            answers.flush()

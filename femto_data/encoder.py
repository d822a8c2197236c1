"""Pieces of documents to token ids, in this process or in several, each with nothing but the tokenizer loaded."""

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

from femto_data.workspace import Interrupted

_BATCH = 2**18  # characters given to the tokenizers library at once: what it returns takes many times their size
_START = "import sys; sys.path[:] = {path!r}; from femto_data.encoder import serve; serve()"


class SlowTokenizer(Protocol):
    """A transformers tokenizer without a backend in Rust."""

    def __call__(self, text: list[str], **options: Any) -> dict[str, list[list[int]]]:
        """Return `input_ids` among others."""


class Encoder:
    """Texts to ids, always by the tokenizer's rules for plain text.

    A document is text: one that spells out "<|endoftext|>" must not end there, so special tokens split like words.
    """

    def __init__(self, tokenizer: str | SlowTokenizer, *, batched: bool = True) -> None:
        """Take a description that tokenizers.Tokenizer.to_str made, or a tokenizer that has none.

        `batched` lets the tokenizers library use threads of its own, which several processes would only fight over.
        """
        self._slow = None if isinstance(tokenizer, str) else tokenizer
        self._batched = batched
        if isinstance(tokenizer, str):
            self._fast = Tokenizer.from_str(tokenizer)
            self._fast.encode_special_tokens = True
            self._fast.no_truncation()
            self._fast.no_padding()

    def __call__(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return each text's number of ids [texts], and all ids [sum], one text behind the other."""
        lengths: list[int] = []
        ids: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)]
        for batch in self._batches(texts):
            for found in self._encode(batch):
                lengths.append(len(found))
                ids.append(np.asarray(found, np.int32))
        return np.asarray(lengths, np.int32), np.concatenate(ids)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if self._slow is not None:  # verbose would warn of texts longer than the model's context
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


class WorkerPool:
    """Processes that encode, each serving one thread of this process at a time. A context manager.

    They read requests from a pipe and end when it closes, so none outlives this process, however it ends.
    """

    def __init__(self, tokenizer: str | SlowTokenizer, workers: int) -> None:
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        command = [sys.executable, "-c", _START.format(path=sys.path)]
        try:
            for _ in range(workers):
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                self._all.append(process)
                _send(process, tokenizer)
                self._free.put(process)
        except BaseException:
            self.close()
            raise

    def __call__(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Encode as `Encoder` does, in the next free process. Raises Interrupted if it goes away."""
        process = self._free.get()
        try:
            _send(process, list(texts))
            assert process.stdout is not None
            answer = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise Interrupted(
                f"a tokenising process ended (exit code {process.wait()}), probably for want of memory; run the same "
                f"command again with fewer --workers, and it goes on from what is done"
            ) from error
        finally:
            self._free.put(process)
        if isinstance(answer, BaseException):
            raise answer
        return cast("tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]", answer)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.kill()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(OSError):  # what was not sent to a process that has ended
                    stream.close()
            process.wait()

    def __enter__(self) -> WorkerPool:
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
    """Encode what comes through standard input until it closes; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the process that started this one answers it
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    with contextlib.suppress(EOFError, BrokenPipeError), answers:
        encoder = Encoder(pickle.load(requests), batched=False)
        while True:
            texts = pickle.load(requests)
            answer: object
            try:
                answer = encoder(texts)
            except Exception as error:  # noqa: BLE001 - raised again where the answer is read
                answer = RuntimeError(f"a tokenising process failed: {type(error).__name__}: {error}")
            pickle.dump(answer, answers, protocol=5)
            answers.flush()

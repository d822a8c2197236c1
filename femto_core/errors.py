"""The two kinds of failure: `UserError`, which the user can mend, and any other exception, which is a defect."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the person at the keyboard can mend.

    Its text is one clear sentence: what is wrong, where (file, line, key, value), what to do. The command line prints
    it on rank 0 without a traceback and exits with code 2. Any other exception ends with a traceback and exit code 1.
    """


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the nearest of `known`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""

"""Whether a file that somebody else named lies in the folder it was named for."""

from __future__ import annotations

from pathlib import Path, PurePosixPath, PureWindowsPath

LONGEST_NAME = 200
"""In bytes: file systems allow 255, and other names are derived from one."""


def outside(folder: Path, name: str) -> str:
    """Return how `name` leads out of `folder`, as the end of a sentence; an empty string where it stays inside.

    A link may lead anywhere within the folder. In a snapshot of the Hugging Face cache, whose files are links to blobs
    beside it, it may lead anywhere within that model's part of the cache.
    """
    rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    if not name or "\0" in name or rooted or ".." in PurePosixPath(name).parts:
        return "not a name within the folder"
    try:
        root, target = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError):
        return "a link that leads nowhere"
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    return "" if target.is_relative_to(root) else f"a link that leads out of the folder, to {target}"


def is_folder_name(name: str) -> bool:
    """Return whether `name`, empty or with slashes in it, names a folder below another on any file system."""
    parts = PurePosixPath(name).parts
    long = any(len(part.encode(errors="replace")) > LONGEST_NAME for part in parts)
    rooted = PurePosixPath(name).is_absolute() or PureWindowsPath(name).anchor
    return not name or bool(parts and not rooted and ".." not in parts and name.isprintable() and not long)

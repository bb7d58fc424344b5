"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text file under another name first, so that it appears, or changes, only when it is whole."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def written_together(folder: str | os.PathLike) -> Iterator[Path]:
    """A scratch folder, whose files go to `folder` at the end of the `with` block, and not at all if it fails."""
    folder = Path(folder)
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            yield Path(scratch)
            for file in sorted(Path(scratch).iterdir(), reverse=True):  # model, then config
                os.replace(file, folder / file.name)
    except BaseException:
        if is_new and not any(folder.iterdir()):
            folder.rmdir()
        raise

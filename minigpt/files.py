"""Files and folders that are as they were or as they are meant to be, and names that every system allows."""

import contextlib
import os
import re
from pathlib import Path

from minigpt.errors import UserError

_FORBIDDEN = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that ``path`` holds either its old content or the new one, never a part, even if power fails.

    Raises:
        UserError: if it can't be written; what was there before is untouched and nothing half-written stays.
    """
    temporary = path.with_name(f".{path.stem}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"could not write {path} ({error.strerror or error}): is the disk full?") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(option: str, path: Path) -> None:
    """Better told now than after some minutes of work.

    Raises:
        UserError: naming the option, if the file can't be written.
    """
    try:
        there = path.exists()
        path.open("a", encoding="utf-8").close()
        if not there:
            path.unlink()
    except OSError as error:
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: can't be written, there is no folder {path.parent}") from None
        raise UserError(f"{option} {path}: can't be written ({error.strerror or error}); name another file") from None


def move_aside(path: Path) -> None:
    """Rename a file or folder to the first free of ``NAME.old-1``, ``NAME.old-2``, ...

    Raises:
        UserError: if the system refuses.
    """
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    try:
        path.rename(aside)
    except OSError as error:
        raise UserError(f"{path}: can't be moved aside to {aside} ({error.strerror or error})") from None


def safe_name(text: str) -> str:
    """The text, changed to what every system allows as a folder's name."""
    name = _FORBIDDEN.sub("_", text.encode("utf-8", "replace").decode()).strip(" .")
    name = name.encode()[:100].decode(errors="ignore").rstrip(" .") or "run"
    return f"_{name}" if _RESERVED.fullmatch(name) else name

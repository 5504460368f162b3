"""Files and folders that other users of the machine cannot read."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_OTHERS = 0o077


def open_private(path: Path | str, flags: int = os.O_RDWR) -> int:
    """Open a file and return its descriptor. A new file is closed to other users. Raises OSError."""
    return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that other users cannot read. Raises OSError."""
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_TRUNC), "wb") as file:
        file.write(content)


def make_private_folder(folder: Path) -> None:
    """Create a folder, with its parents, that other users cannot enter. Raises OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(FOLDER_MODE, exist_ok=True)
    make_private(folder)


def make_private(path: Path) -> None:
    """Take other users' rights from an existing file or folder, and log it.

    If the file belongs to another user, only logs the command for its owner.
    """
    status = path.stat()
    if not status.st_mode & _OTHERS:
        return
    mode = stat.S_IMODE(status.st_mode) & ~_OTHERS
    try:
        path.chmod(mode)
    except OSError as error:
        logger.warning(
            "%s is open to other users (mode %04o) and belongs to user %d, so its mode cannot be changed here (%s): "
            "run `chmod go= %s` as that user",
            path,
            stat.S_IMODE(status.st_mode),
            status.st_uid,
            error.strerror,
            path,
        )
    else:
        before = stat.S_IMODE(status.st_mode)
        logger.warning("%s was open to other users (mode %04o): its mode is %04o now", path, before, mode)

"""Files that several processes read and write."""

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or none of it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.unfinished")
    unfinished.write_bytes(content)
    unfinished.replace(path)

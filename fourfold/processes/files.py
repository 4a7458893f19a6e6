"""Files that several processes read and write."""

import os
import threading
from pathlib import Path


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that other processes see all of it or none of it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.unfinished")
    temporary.write_bytes(content)
    temporary.replace(path)

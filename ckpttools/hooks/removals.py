"""How does a large directory go without anyone waiting for it? In a thread, one after the other.

The directories have hidden names already: whatever becomes of the thread, no reader meets them, and
the next run's sweep takes what is left.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path


class Removals:
    """Deletes directories; the interpreter waits for it when it ends."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._problems: list[str] = []

    def begin(self, hidden: Path) -> None:
        """Begin to delete a directory that nobody looks for any more."""
        before = self._threads[-1] if self._threads else None
        thread = threading.Thread(
            target=self._delete, args=(hidden, before), name=f"ckpttools-remove-{hidden.name}"
        )
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            self._delete(hidden, before)
        else:
            self._threads.append(thread)

    def wait(self) -> list[str]:
        """Wait for all that was begun; return a line on each that could not be deleted, once."""
        while self._threads:
            self._threads.pop().join()
        problems, self._problems = self._problems, []
        return problems

    def _delete(self, hidden: Path, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            shutil.rmtree(hidden)
        except OSError as error:
            self._problems.append(f"{hidden}: can't remove it: {error.strerror or error}")

"""When does a gradient that has come stay where it is? Inside ``no_sync``, of either optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class NoSync:
    """A switch that stops the reduction of gradients for a while."""

    def __init__(self) -> None:
        self._syncing = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: no bucket is sent off inside."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    @property
    def syncing(self) -> bool:
        """Whether gradients are reduced as they come: false inside :meth:`no_sync`."""
        return self._syncing

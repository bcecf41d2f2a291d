"""When are parameters gathered in ZeRO-2? A few buckets at a time, in forward order.

A gather needs memory for a whole bucket where parameters lie alone, so at most ``limit`` are under
way, in the memory that gradients use later; the next one starts when the oldest has ended. Every
rank starts them in the same order, whichever bucket it waits for first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ckpttools.optimizer.fused_buckets import BufferPool, FusedBucket


class ParamGathers:
    """Gathers the buckets of ``order``, which is that in which a forward pass needs them."""

    def __init__(self, order: Sequence[FusedBucket], pool: BufferPool, *, limit: int) -> None:
        self.order = tuple(order)
        self._pool = pool
        self._limit = limit
        self._waiting: deque[FusedBucket] = deque()
        self._under_way: deque[FusedBucket] = deque()
        for bucket in self.order:
            bucket.wait_for_params = self.finish

    def start(self, bucket: FusedBucket) -> None:
        """Ask for one bucket, after all that were asked for before."""
        if bucket.collectives.size == 1:
            return
        bucket.gathering = True
        self._waiting.append(bucket)
        self._advance()

    def start_all(self) -> None:
        """Ask for all buckets."""
        self.finish_all()
        for bucket in self.order:
            self.start(bucket)

    def finish(self, bucket: FusedBucket) -> None:
        """Wait until a bucket's parameters are there."""
        while bucket.gathering:
            self._finish_oldest()

    def finish_all(self) -> None:
        """Wait until all parameters are there that were asked for."""
        while self._under_way or self._waiting:
            self._finish_oldest()

    def make_room(self) -> None:
        """Wait for the oldest gather where no other could be started."""
        if len(self._under_way) >= self._limit:
            self._finish_oldest()

    def _advance(self) -> None:
        while self._waiting and len(self._under_way) < self._limit:
            bucket = self._waiting.popleft()
            bucket.start_gather(self._pool)
            self._under_way.append(bucket)

    def _finish_oldest(self) -> None:
        self._under_way.popleft().finish_gather(self._pool)
        self._advance()

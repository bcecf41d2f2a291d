"""How does an operation on messages go on while the rank that issued it computes?

The caller posts the messages and hands the operation to a thread, which waits for them and does
what is left. torch gives up the interpreter's lock in both. An error is kept and raised where the
operation is waited for; those handed over later fail with it, since messages of a broken
operation may still be under way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol

from ckpttools.errors import OptimizerError

_PROBE_S = 1.0  # after so long without an end, a wait asks whether the peers are still there
_EXIT_WAIT_S = 0.5  # at exit, for a thread that may hang in a message that never comes


class Message(Protocol):
    """A send or a receive that was posted."""

    def wait(self) -> object:
        """Return when the bytes are where they belong; raise RuntimeError if they can't be."""
        ...


class FinishedWork:
    """An operation that needed no communication."""

    def wait(self) -> None:
        """Return at once."""


class Exchange:
    """One operation under way: posted by the caller, finished by the group's thread."""

    def __init__(
        self,
        where: str,
        finish: Callable[[], None],
        issued: Sequence[Message],
        probe: Callable[[], Exception | None],
    ) -> None:
        self._where = where
        self._finish = finish
        self._probe: Callable[[], Exception | None] = probe
        self._issued = issued
        self._done = threading.Event()
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether ``wait()`` would return or raise at once."""
        return self._done.is_set()

    def wait(self) -> None:
        """Return when this rank's part is done and the buffer may be used.

        Raises:
            OptimizerError: the communication failed, here or in an earlier operation.
        """
        # gloo doesn't end a message of which a part had arrived when its sender died.
        while not self._done.wait(_PROBE_S):
            lost = self._probe()
            if lost is not None:
                raise broken(self._where, lost) from lost
        if self._error is not None:
            raise broken(self._where, self._error) from self._error

    def run(self) -> Exception | None:
        """Finish in the group's thread; return the error, if there was one."""
        try:
            self._finish()
            for message in self._issued:
                message.wait()
        except Exception as error:  # noqa: BLE001 - it is raised where the work is waited for
            self._error = error
        self._close()
        return self._error

    def fail(self, error: Exception) -> None:
        """End with the error of an earlier operation."""
        self._error = error
        self._close()

    def _close(self) -> None:
        # Lets go of buffers and messages: the caller may keep the work for long.
        self._finish, self._issued, self._probe = nothing, (), nothing
        self._done.set()


def broken(where: str, error: Exception) -> OptimizerError:
    """Return the error that says, in one line, that an operation failed, and why."""
    reason = " ".join(str(error).split())
    return OptimizerError(f"{where}: must reach every rank of its group, got: {reason}")


def nothing() -> None:
    """Finish an operation that only has to wait for its messages."""


def _serve(queue: SimpleQueue[Exchange | None]) -> None:
    error: Exception | None = None
    while (exchange := queue.get()) is not None:
        if error is None:
            error = exchange.run()
        else:
            exchange.fail(error)
        del exchange  # else its buffer lives until the next operation


class Finisher:
    """One thread that finishes operations in the order in which they are handed over.

    It is started for the first of them. It ends when this object does, or the interpreter.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Exchange | None] | None = None

    def hand_over(self, exchange: Exchange) -> None:
        """Let the thread finish ``exchange`` after all that came before."""
        if self._queue is None:
            self._queue = SimpleQueue()
            thread = threading.Thread(
                target=_serve, args=(self._queue,), name="ckpttools-finisher", daemon=True
            )
            thread.start()
            weakref.finalize(self, _stop, self._queue, thread)
        self._queue.put(exchange)


def _stop(queue: SimpleQueue[Exchange | None], thread: threading.Thread) -> None:
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_WAIT_S)

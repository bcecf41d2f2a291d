"""Who writes a checkpoint while training goes on? A thread on each rank, and they meet in files.

1. The training thread copies the state to host images and returns (`ckpttools.hooks.host_images`).
2. This rank's thread writes its files from the images, sums them, syncs them, and says so.
3. Rank 0's thread waits until every rank has said so, writes what depends on all sums, publishes
   by one rename, moves ``latest``, and says so. The others wait for its word.

Nothing goes over the groups that training uses (`ckpttools.hooks.rendezvous`). Whatever fails, the
threads of all ranks end, and each knows that the save failed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ckpttools.errors import CkptError, StorageError
from ckpttools.formats.native.manifest_file import StatedFile
from ckpttools.hooks.file_content import FileContent, MemoryPool
from ckpttools.hooks.rendezvous import Rendezvous
from ckpttools.hooks.save_plan import SavePlan
from ckpttools.hooks.step_directory import remove_tree
from ckpttools.hooks.write_files import host_bytes
from ckpttools.hooks.write_image import write_image
from ckpttools.storage.commit import Staging
from ckpttools.storage.local import write_new_file

VERDICT_GRACE_S = 5.0
"""How much longer than rank 0 the others wait, so that it is rank 0 who says what was late."""

REST = 2.0
"""How long the writer rests after a block, in units of the processor time that it took."""

LEAST_REST_S = 0.02
"""Shorter rests are put off: each system call may cost a turn of Python's lock, 5 ms."""

CHECK_S = 0.25
"""How often a writer asks whether the save has failed elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One save to be written: the images of a plan's files, and where they go.

    ``staging`` is rank 0's, entered; ``publish`` gets it when all that is in it is written.
    """

    step: int
    root: Path
    plan: SavePlan
    images: list[Tensor]
    rendezvous: Rendezvous
    deadline_s: float
    staging: Staging | None = None
    publish: Callable[[Staging], None] = Staging.publish
    after: Callable[[], None] | None = None


class BackgroundWrite:
    """A job under way, in a thread of its own, which the interpreter waits for when it ends."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds = 0.0
        self._error: Exception | None = None
        self._hurry = threading.Event()
        self._owed_s = 0.0
        self._checked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"ckpttools-save-{job.step}")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it is still under way."""
        return self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether it has ended badly."""
        return not self.running and self._error is not None

    def join(self) -> None:
        """Wait for the end, without rests from now on."""
        self._hurry.set()
        self._thread.join()

    def result(self) -> bool:
        """Return true once it has ended well.

        Raises:
            CkptError: it hasn't.
        """
        if self._error is not None:
            raise self._error
        return True

    def clean_up(self) -> None:
        """Remove what is left on rank 0, once the threads of all ranks have ended.

        One that was still writing when a save was given up may have kept its directory.
        """
        if self.job.staging is not None:
            remove_tree(self.job.rendezvous.root)
            remove_tree(self.job.staging.path)
            remove_tree(self.job.staging.journal_path)

    def _run(self) -> None:
        started = time.monotonic()
        deadline = started + self.job.deadline_s
        self._hurry.wait(LEAST_REST_S)  # the training thread is still on its way out of the save
        try:
            try:
                self.job.rendezvous.done(self._write())
            except Exception as error:
                self.job.rendezvous.check()  # others may have failed first, and this for that
                with suppress(CkptError):  # if this fails too, this rank counts as gone
                    self.job.rendezvous.failed(_text(error))
                raise
            if self.job.staging is None:
                self.job.rendezvous.wait_for_verdict(deadline + VERDICT_GRACE_S)
        except Exception as error:  # noqa: BLE001  # it is raised in the training thread
            self._error = error
        if self.job.staging is not None:
            self._publish(self.job.staging, deadline)
        self.seconds = time.monotonic() - started
        self.job.rendezvous.close()

    def _write(self) -> list[StatedFile]:
        """Write this rank's files from their images."""
        files, images = self.job.plan.files, [host_bytes(image) for image in self.job.images]

        def read(file: int, offset: int, buffer: memoryview) -> None:
            buffer[:] = images[file][offset : offset + len(buffer)]

        held, pool = self.job.plan.contents(), MemoryPool(read)
        return [
            write_image(self.job.root, file, image, self._pause, FileContent(i, held, pool))
            for i, (file, image) in enumerate(zip(files, images, strict=True))
        ]

    def _pause(self, used_s: float) -> None:
        """Rest between two blocks, unless somebody waits; break off a save that has failed."""
        now = time.monotonic()
        if now > self._checked + CHECK_S:
            self._checked = now
            self.job.rendezvous.check()
        self._owed_s += used_s * REST
        if self._owed_s > LEAST_REST_S:
            self._hurry.wait(self._owed_s)
            self._owed_s = 0.0

    def _publish(self, staging: Staging, deadline: float) -> None:
        """Publish what all ranks wrote, or take away what some of them did; tell them."""
        job = self.job
        try:
            if self._error is None:
                self._finish(staging, deadline)
        except Exception as error:  # noqa: BLE001  # as above
            self._error = error
        reason = "" if self._error is None else _text(self._error)
        try:
            job.rendezvous.give_verdict(reason)
            staging.__exit__(None, None, None)
            if not reason and job.after is not None:
                job.after()
        except Exception as error:  # noqa: BLE001  # as above
            self._error = self._error or error

    def _finish(self, staging: Staging, deadline: float) -> None:
        """Write what depends on all sums, publish, and let ``latest`` name it."""
        stated = self.job.rendezvous.wait_for_all(deadline)
        for path, data in self.job.plan.finish(stated).items():
            write_new_file(staging.path / path, data)
        self.job.publish(staging)


def _text(error: Exception) -> str:
    """Return an error as one line for the other ranks."""
    kind = "" if isinstance(error, CkptError) else f"{type(error).__name__}: "
    return f"{kind}{error}" or StorageError.__name__

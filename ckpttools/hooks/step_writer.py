"""How does a planned save become a step's directory? At once, or behind the training.

Either way rank 0 makes a staging directory, every rank writes and syncs its own files there, and
one rename publishes them; then ``latest`` moves, and what the rule of retention gives up loses its
name, and is deleted behind the training. An error on any rank takes the staging directory away and
leaves ``latest`` where it was.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ckpttools.errors import CkptError, StorageError
from ckpttools.hooks.background import BackgroundWrite, Job
from ckpttools.hooks.crew import Crew
from ckpttools.hooks.host_images import HostImages
from ckpttools.hooks.removals import Removals
from ckpttools.hooks.rendezvous import Rendezvous
from ckpttools.hooks.retention import Retention, apply_retention
from ckpttools.hooks.save_plan import SavePlan
from ckpttools.hooks.step_directory import StepDirectory, remove_tree
from ckpttools.hooks.write_files import write_live
from ckpttools.storage.commit import Staging
from ckpttools.storage.local import write_new_file


class StepWriter:
    """Writes the steps of one directory, one at a time.

    ``notes`` has a line on each step that retention could not remove or strip.
    """

    def __init__(self, directory: StepDirectory, retention: Retention, deadline_s: float) -> None:
        self.directory = directory
        self.retention = retention
        self.deadline_s = deadline_s
        self.notes: list[str] = []
        self._images = HostImages()
        self._under_way: BackgroundWrite | None = None
        self._removals = Removals()
        self._swept = False

    # ---- every method up to the next line is a collective call ---------------------------

    def sweep(self, crew: Crew) -> None:
        """Make the directory and remove what killed saves have left there, once.

        Raises:
            StorageError: rank 0 can't make it; raised on every rank.
        """
        if self._swept:
            return

        def work() -> bool:
            if crew.rank == 0:
                try:
                    self.directory.root.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise StorageError(
                        f"{self.directory.root}: must be a directory, got: "
                        f"{error.strerror or error}"
                    ) from error
                self.directory.sweep()
            return True

        crew.together(work)
        self._swept = True

    def prepare(self, plan: SavePlan, crew: Crew) -> None:
        """Get the memory for saves of such a plan."""

        def work() -> bool:
            self._images.prepare(plan)
            return True

        crew.together(work)

    def write_now(self, step: int, plan: SavePlan, crew: Crew, *, overwrite: bool) -> None:
        """Write and publish a step from the live tensors.

        Raises:
            CkptError: any rank could not write; raised on every rank, and nothing was published.
        """
        mine: list[Staging] = []
        try:
            root = crew.together(lambda: self._enter(step, crew, mine, overwrite=overwrite))[0]
            found = crew.together(lambda: write_live(_seen(root), plan))
            files = [file for stated in found for file in stated]

            def publish() -> bool:
                for staging in mine:
                    for path, data in plan.finish(files).items():
                        write_new_file(staging.path / path, data)
                    self.directory.publish(step, staging)
                return True

            crew.together(publish)
        finally:
            for staging in mine:
                staging.__exit__(None, None, None)
        if crew.rank == 0:
            self._retain()

    def begin(self, step: int, plan: SavePlan, crew: Crew, *, overwrite: bool) -> None:
        """Copy the state and begin to write it; returns once all ranks have their copies.

        Raises:
            CkptError: any rank could not begin; raised on every rank, and none has.
        """
        mine: list[Staging] = []
        jobs: list[Job] = []

        def enter() -> str:
            root = self._enter(step, crew, mine, overwrite=overwrite)
            if mine:
                _meeting_place(root).mkdir()
            return root

        def copy(root: str) -> bool:
            rendezvous = Rendezvous(_meeting_place(root), crew.rank, crew.size)
            jobs.append(
                Job(
                    step=step,
                    root=_seen(root),
                    plan=plan,
                    images=self._images.take(plan),
                    rendezvous=rendezvous,
                    deadline_s=self.deadline_s,
                    staging=mine[0] if mine else None,
                    publish=lambda staging: self.directory.publish(step, staging),
                    after=self._retain,
                )
            )
            return True

        try:
            root = crew.together(enter)[0]
            crew.together(lambda: copy(root))
        except BaseException:
            for job in jobs:
                job.rendezvous.close()
            for staging in mine:
                remove_tree(_meeting_place(str(staging.path)))
                staging.__exit__(None, None, None)
            raise
        self._under_way = BackgroundWrite(jobs[0])
        self._under_way.start()

    def collect(self, crew: Crew) -> None:
        """Wait for what is being written.

        Raises:
            CkptError: it failed on any rank; raised on every rank.
        """
        write, self._under_way = self._under_way, None
        if write is not None:
            write.join()
            try:
                crew.together(write.result)
            finally:
                write.clean_up()

    def publish_by(self, step: int, crew: Crew, write: Callable[[], None]) -> None:
        """Let ``write``, a collective call, write and publish a step's directory.

        Raises:
            CkptError: it could not, or ``latest`` can't be moved; raised on every rank.
        """
        with ExitStack() as mine:

            def announce() -> bool:
                if crew.rank == 0:
                    self.close()
                    mine.enter_context(self.directory.announced(step))
                return True

            def move() -> bool:
                mine.close()
                return True

            crew.together(announce)
            write()
            crew.together(move)
        if crew.rank == 0:
            self._retain()

    # ---- the rest is this rank's own -----------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether the write under way has ended badly, as far as this rank knows."""
        return self._under_way is not None and self._under_way.failed

    @property
    def busy(self) -> bool:
        """Whether a write is under way, or its end was not collected yet."""
        return self._under_way is not None

    def join(self) -> None:
        """Wait for the end of this rank's part of what is being written; raise nothing."""
        if self._under_way is not None:
            self._under_way.join()

    def close(self) -> None:
        """Wait until what lost its name is deleted."""
        self.notes += self._removals.wait()

    def _enter(self, step: int, crew: Crew, mine: list[Staging], *, overwrite: bool) -> str:
        """Make the staging directory on rank 0."""
        if crew.rank != 0:
            return ""
        self.close()  # the disk may not have room for one more
        job = secrets.token_hex(16)
        staging = Staging(self.directory.path(step), job=job, overwrite=overwrite).__enter__()
        mine.append(staging)
        return str(staging.path)

    def _retain(self) -> None:
        try:
            self.notes += apply_retention(self.retention, self.directory, self._removals)
        except CkptError as error:
            self.notes.append(str(error))


def _meeting_place(staging: str) -> Path:
    """Return the directory in which the ranks of an asynchronous save meet."""
    head, name = os.path.split(staging)
    return Path(head, name.replace(".partial-", ".ranks-"))


def _seen(root: str) -> Path:
    """Return the staging directory as this rank sees it.

    Raises:
        StorageError: it doesn't.
    """
    place = Path(root)
    if not place.is_dir():
        raise StorageError(f"{place}: every rank must see this directory, got none")
    return place

"""How is a training run saved, each rank its own part? Written per rank, published once.

1. All ranks describe the run to each other; from then on each knows the place of its own bytes.
2. Rank 0 makes the staging directory; every rank writes and syncs its own files there.
3. Checksums come together, rank 0 writes ``manifest.json``, and one rename publishes the whole.

An error on any rank is raised on all, and nothing is published.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ckpttools.errors import system_errors
from ckpttools.hooks.save_plan import plan_native
from ckpttools.hooks.together import rank_of, together
from ckpttools.hooks.write_files import write_live
from ckpttools.optimizer import ShardedOptimizer
from ckpttools.storage.commit import Staging
from ckpttools.storage.local import write_new_file


@system_errors()
def save_sharded(
    directory: str | Path,
    optimizer: ShardedOptimizer,
    *,
    iteration: int | None = None,
    scheduler: Mapping[str, object] | None = None,
    carry: Mapping[str, object] | None = None,
    overwrite: bool = False,
) -> Path:
    """Save weights, masters, moments, steps and groups in the native sharded form.

    A collective call of all ranks, which must see one filesystem. ``scheduler`` is plain data.
    ``carry`` is ``Restored.objects`` of the checkpoint that the run began with, so that what only
    a foreign format needs is not lost. Returns the directory.

    Raises:
        CkptError: any rank could not write; raised on every rank, and nothing was published.
    """
    place = Path(os.path.abspath(directory))
    plan = plan_native(optimizer, iteration=iteration, scheduler=scheduler, carry=carry)
    with staged(place, optimizer, overwrite=overwrite) as root:
        found = together(optimizer, lambda: write_live(root, plan))
        files = [file for mine in found.values() for file in mine]

        def finish() -> bool:
            if rank_of(optimizer) == 0:
                for path, data in plan.finish(files).items():
                    write_new_file(root / path, data)
            return True

        together(optimizer, finish)
    return place


@contextmanager
def staged(place: Path, optimizer: ShardedOptimizer, *, overwrite: bool) -> Iterator[Path]:
    """Give all ranks one staging directory; it becomes ``place`` if the body ends well everywhere.

    Raises:
        CkptError: rank 0 can't make or publish it; raised on every rank.
    """
    mine: list[Staging] = []
    first = rank_of(optimizer) == 0

    def enter() -> str:
        if not first:
            return ""
        entered = Staging(place, overwrite=overwrite).__enter__()
        mine.append(entered)
        return str(entered.path)

    def publish() -> bool:
        if first:
            mine[0].publish()
        return True

    try:
        root = Path(together(optimizer, enter)[0])
        yield root
        together(optimizer, publish)
    finally:
        if mine:
            mine[0].__exit__(None, None, None)

"""What was done, what was proven, and what was not carried over? A report to read or parse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

INTERPRETER_BYTES = 100_000_000
"""What Python, numpy and the structure of a checkpoint take beside the buffers, about."""


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a conversion. Counts are of tensors and bytes; ``seconds`` is wall time.

    ``paths`` are the files that the plan writes to, with their sizes; small files with names and
    digests come on top. ``plan`` describes the work, ``proof`` holds a line for each check that
    passed, ``skipped`` one for each that was left out on request, ``carried`` and ``lost`` what of
    the source's other state went along and what didn't, ``findings`` what the reader of the report
    should know.
    """

    source: str
    destination: str
    src_format: str
    dst_format: str
    src_topology: Mapping[str, int]
    dst_topology: Mapping[str, int]
    tensors: int
    state_bytes: int
    ops: int
    read_bytes: int
    write_bytes: int
    buffer_bytes: int
    files: int
    seconds: float = 0.0
    dry_run: bool = False
    paths: tuple[tuple[str, int], ...] = ()
    plan: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    findings: tuple[str, ...] = field(default=())

    @property
    def memory_bytes(self) -> int:
        """Predicted peak of memory: the buffers and the interpreter."""
        return self.buffer_bytes + INTERPRETER_BYTES

    def to_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        return {**asdict(self), "memory_bytes": self.memory_bytes}

    def lines(self, *, verbose: bool = False) -> list[str]:
        """Return the report as text; ``verbose`` lists files and what was carried."""
        done = "would write" if self.dry_run else "wrote"
        route = (
            f"{self.src_format} {topology_text(self.src_topology)} -> "
            f"{self.dst_format} {topology_text(self.dst_topology)}"
        )
        what = f"{self.tensors} tensors, {size_text(self.state_bytes)} of state"
        lines = [
            " ".join(route.split()),
            f"{done} {self.destination}: {what} in {self.files} files",
            *self.plan,
        ]
        if self.dry_run:
            lines += self._needs()
        if verbose:
            lines += [f"file: {path}, {size_text(size)}" for path, size in self.paths]
        lines += [f"proven: {line}" for line in self.proof]
        lines += [f"not checked: {line}" for line in self.skipped]
        if verbose:
            lines += [f"carried: {line}" for line in self.carried]
        elif self.carried:
            lines.append(f"carried: {', '.join(map(_subject, self.carried))}")
        lines += [f"NOT carried: {line}" for line in self.lost]
        lines += [f"note: {line}" for line in self.findings]
        lines.append("nothing was written" if self.dry_run else f"done in {self.seconds:.2f} s")
        return lines

    def _needs(self) -> list[str]:
        """Say what a run would take of memory and what the disk has."""
        free = free_bytes(self.destination)
        return [
            f"memory: about {size_text(self.memory_bytes)} with all buffers in use",
            f"disk: {size_text(free)} free at the destination",
        ]


def free_bytes(place: str) -> int:
    """Return the free bytes of the file system on which ``place`` is, or would be."""
    path = Path(os.path.abspath(place))
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def topology_text(topology: Mapping[str, int]) -> str:
    """Write a topology in the field's order.

    >>> topology_text({"tp": 2, "pp": 1, "dp": 4, "cp": 1})
    'TP2 PP1 DP4'
    """
    return " ".join(
        f"{name.upper()}{size}"
        for name, size in topology.items()
        if name in ("tp", "pp", "dp") or size != 1
    )


def size_text(size_bytes: int) -> str:
    """Write a size in bytes with a decimal unit.

    >>> size_text(999), size_text(1_520_000), size_text(999_960)
    ('999 bytes', '1.5 MB', '1.0 MB')
    """
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    value = size_bytes / 1000
    for unit in ("kB", "MB", "GB"):
        if value < 999.95:  # what is rounded up to 1000 has the next unit
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _subject(line: str) -> str:
    """Return what a line is about.

    >>> _subject("args, with the sizes of the new topology"), _subject("optimizer: its groups")
    ('args', 'optimizer')
    """
    return line.split(",", 1)[0].split(":", 1)[0]

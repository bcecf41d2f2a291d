"""What was done, what was proven, and what was not carried over? A report to read or parse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of a conversion. Counts are of tensors and bytes; ``seconds`` is wall time.

    ``proof`` holds a line for each check that passed, ``skipped`` one for each that was left out
    on request, ``findings`` what the reader of the report should know.
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
    digest: str = ""
    plan: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    findings: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as text."""
        done = "would write" if self.dry_run else "wrote"
        route = (
            f"{self.src_format} {topology_text(self.src_topology)} -> "
            f"{self.dst_format} {topology_text(self.dst_topology)}"
        )
        what = f"{self.tensors} tensors, {size_text(self.state_bytes)} of state"
        lines = [
            route.rstrip(),
            f"{done} {self.destination}: {what} in {self.files} files",
            *self.plan,
        ]
        lines += [f"proven: {line}" for line in self.proof]
        lines += [f"not checked: {line}" for line in self.skipped]
        lines += [f"carried: {line}" for line in self.carried]
        lines += [f"NOT carried: {line}" for line in self.lost]
        lines += [f"note: {line}" for line in self.findings]
        if not self.dry_run:
            lines.append(f"done in {self.seconds:.2f} s")
        return lines


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

    >>> size_text(999), size_text(1_500_000)
    ('999 B', '1.50 MB')
    """
    value, unit = float(size_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{size_bytes} B" if unit == "B" else f"{value:.2f} {unit}"

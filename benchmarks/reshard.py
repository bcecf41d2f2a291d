"""How fast is a reshard, and what does it take? `cp -r` of the same files is the measure.

Two jobs on a synthetic Llama-shaped Megatron checkpoint (see synthetic.py), each with the full
proof and once more with nothing but the copying. Every run is a fresh process; in each round all
of them and `cp -r` (also followed by fsync, which a published checkpoint has had) take turns, so
that noise falls on all alike. The page cache holds the source; what earlier runs left to write
is flushed before each run.

    python benchmarks/reshard.py --size 2GB --runs 3
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # an uninstalled checkout will do

import synthetic

from ckpttools import api, conversion, evidence
from ckpttools.storage.commit import Staging
from ckpttools.storage.local import FilePool

VERSION = """
import json, re, sys
from ckpttools.cli.main import main
sys.argv = ["ckpttools", "--version"]
try:
    main()
except SystemExit:
    peak = re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]
    print(json.dumps({"peak_rss": int(peak) * 1024}))
"""
CP_FSYNC = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Job:
    """A reshard to measure: topologies (tp, pp, dp) of source and destination."""

    name: str
    src: tuple[int, int, int]
    dst: tuple[int, int, int]


JOBS = (
    Job("TP2 PP2 DP2 -> TP1 PP1 DP4", (2, 2, 2), (1, 1, 4)),
    Job("TP1 -> TP8", (1, 1, 1), (8, 1, 1)),  # more ranks than query groups
)


@dataclass(slots=True)
class Run:
    """What one process took. ``detail`` is what it told of itself, in bytes and seconds."""

    wall: float
    cpu: float
    detail: dict[str, Any] = field(default_factory=dict)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=size_of, default=2 * 10**9, help="bytes of state: 2GB")
    parser.add_argument("--runs", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--memory", type=size_of, default=1 << 30, help="budget: 1GiB")
    parser.add_argument("--workers", type=int, help="threads (default: the product's)")
    parser.add_argument("--keep", metavar="DIR", help="make the sources here, or find them here")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(**json.loads(options.child))))
        return
    with place_of(options.keep) as place:
        result = measure(place, options)
    print(json.dumps(result, indent=2) if options.json else table(result))


def size_of(text: str) -> int:
    """Parse a size such as 64MiB or 2GB."""
    match = re.fullmatch(r"([0-9.]+)\s*([KMG]?I?B?)", text.strip().upper())
    if match is None or match[2] not in UNITS:
        raise argparse.ArgumentTypeError(f"must be a size such as 64MiB or 2GB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


@contextmanager
def place_of(keep: str | None) -> Iterator[Path]:
    """Lend the directory that everything is made in; a kept one keeps its sources."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ckpttools-bench-") as name:
            yield Path(name)
        return
    place = Path(keep)
    place.mkdir(parents=True, exist_ok=True)
    yield place


# --- measuring --------------------------------------------------------------------------


def measure(place: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Make the sources, run every job ``options.runs`` times, and sum up."""
    model = synthetic.shape_of_size(options.size)
    load = os.getloadavg()[0]
    sources = {job: make_source(place, model, job) for job in JOBS}
    common = {"memory": options.memory, "workers": options.workers}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed program is compiled once
    os.environ["PYTHONPYCACHEPREFIX"] = str(place / ".compiled")
    start = [timed([sys.executable, "-c", VERSION]) for _ in range(2)][-1]
    runs: dict[str, dict[str, list[Run]]] = {job.name: {} for job in JOBS}
    first = JOBS[0]
    what = {"src": str(sources[first]), "dst": str(place / ".dry"), "target": first.dst, **common}
    timed(child_command(verb="dry run", **what))
    for _ in range(options.runs):
        for job, source in sources.items():
            dst = place / f".out-{os.getpid()}"
            what = {"src": str(source), "dst": str(dst), "target": job.dst, **common}
            commands = {
                "cp": ["cp", "-r", str(source), str(dst)],
                "cp+fsync": ["sh", "-c", CP_FSYNC, str(source), str(dst)],
                "copy": child_command(verb="copy", **what),
                "reshard": child_command(verb="reshard", **what),
            }
            for kind, command in commands.items():
                os.sync()
                try:
                    runs[job.name].setdefault(kind, []).append(timed(command))
                finally:
                    shutil.rmtree(dst, ignore_errors=True)
    return {
        "model": str(model),
        "state_bytes": model.state_bytes,
        "memory_bytes": options.memory,
        "cpus": os.cpu_count(),
        "load": load,
        "rounds": options.runs,
        "version_rss_bytes": start.detail["peak_rss"],
        "jobs": {
            name: {kind: summary(kinds[kind], kinds, model, start) for kind in kinds}
            for name, kinds in runs.items()
        },
        "runs": {
            name: {kind: [asdict(run) for run in done] for kind, done in kinds.items()}
            for name, kinds in runs.items()
        },
    }


def make_source(place: Path, model: synthetic.ModelShape, job: Job) -> Path:
    """Make a job's source, unless a kept one is there; refuse a disk that is too small."""
    tp, pp, dp = job.src
    root = place / f"llama-{model.state_bytes}-tp{tp}-pp{pp}-dp{dp}"
    if not root.exists():
        need = (len(JOBS) + 1) * model.state_bytes * 11 // 10
        free = shutil.disk_usage(place).free
        if free < need:
            sys.exit(f"{place}: must have {need / 1e9:.1f} GB free, got {free / 1e9:.1f}")
        making = place / f".making-{os.getpid()}"
        try:
            synthetic.write_checkpoint(making, model, tp=tp, pp=pp, dp=dp)
            making.rename(root)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    for path in root.rglob("*.pt"):  # into the page cache
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(1 << 20)
            while file.readinto(buffer):
                pass
    return root


def child_command(**arguments: object) -> list[str]:
    return [sys.executable, __file__, "--child", json.dumps(arguments)]


def timed(command: list[str]) -> Run:
    """Run a command; its CPU time is that of all its threads and processes."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    if process.returncode:
        sys.exit(f"{command[0]}: must succeed, got exit code {process.returncode}")
    last = printed.rstrip().rpartition("\n")[2]
    detail = json.loads(last) if last.startswith("{") else {}
    return Run(wall, usage.ru_utime + usage.ru_stime, detail)


def summary(
    runs: list[Run], kinds: dict[str, list[Run]], model: synthetic.ModelShape, start: Run
) -> dict[str, Any]:
    """Return medians over rounds; ratios are taken within each round."""
    walls = [run.wall for run in runs]
    cpu = statistics.median(run.cpu for run in runs)
    result: dict[str, Any] = {
        "wall": statistics.median(walls),
        "wall_min": min(walls),
        "wall_max": max(walls),
        "cpu": cpu,
        "gb_per_cpu_second": model.state_bytes / 1e9 / cpu,
        "ratio_to_cp": ratio(runs, kinds["cp"]),
        "ratio_to_cp_fsync": ratio(runs, kinds["cp+fsync"]),
    }
    first = runs[0].detail
    if first:
        peak = max(run.detail["peak_rss"] for run in runs)
        state = model.state_bytes
        result |= {
            "extra_rss_bytes": peak - start.detail["peak_rss"],
            "reads_per_state": first["pool_read"] / state,
            "writes_per_state": first["pool_written"] / state,
            "proc_reads_per_state": first["proc_read"] / state,
            "proc_writes_per_state": first["proc_written"] / state,
            "plan_seconds": statistics.median(r.detail["phases"]["plan"][0] for r in runs),
            **{key: first[key] for key in ("ops", "tensors", "most_ops_of_a_tensor")},
            "phases": {
                name: [statistics.median(r.detail["phases"][name][i] for r in runs) for i in (0, 1)]
                for name in first["phases"]
            },
        }
    return result


def ratio(runs: list[Run], base: list[Run]) -> float:
    return statistics.median(a.wall / b.wall for a, b in zip(runs, base, strict=True))


# --- one run, in a process of its own ---------------------------------------------------


def child(verb: str, **arguments: Any) -> dict[str, Any]:
    """Do one thing and tell what it took."""
    meter = Meter()
    with meter.measuring():
        reshard(verb, **arguments)
    return meter.result()


def reshard(
    verb: str,
    *,
    src: str,
    dst: str,
    target: list[int],
    memory: int,
    workers: int | None,
) -> None:
    """Reshard with all proofs, with none of them (``copy``), or only plan (``dry run``)."""
    tp, pp, dp = target
    sizes = api.Target(tp=tp, pp=pp, dp=dp)
    resources = api.Resources(memory, workers) if workers else api.Resources(memory)
    if verb == "copy":
        evidence.check_replicas = lambda *_, **__: 0
        conversion.prove = lambda *_, **__: conversion.Proof(())
    api.reshard(
        src,
        dst,
        target=sizes,
        resources=resources,
        cross_check=verb != "copy",
        dry_run=verb == "dry run",
    )


class Meter:
    """Counts what the product reads and writes, and times its phases (wall, CPU)."""

    def __init__(self) -> None:
        self.phases: dict[str, list[float]] = {}
        self.pools: list[FilePool] = []
        self.plan: dict[str, int] = {}

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Stand between the product and its phases; this process does nothing afterwards."""
        self._time(evidence, "choose", "evidence")
        self._time(evidence, "check_replicas", "replicas")
        self._time(conversion, "lay_out", "plan")
        self._time(conversion, "write", "write")
        self._time(conversion, "prove", "compare")
        self._time(Staging, "publish", "sync")
        enter = FilePool.__enter__

        def counted(pool: FilePool) -> FilePool:
            self.pools.append(pool)
            return enter(pool)

        FilePool.__enter__ = counted
        yield

    def _time(self, owner: object, name: str, phase: str) -> None:
        function = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.process_time()
            result = function(*args, **kwargs)
            self.phases[phase] = [time.perf_counter() - wall, time.process_time() - cpu]
            if phase == "plan":
                plan = result[1]
                self.plan = {
                    "ops": plan.op_count,
                    "tensors": len(plan.tensors),
                    "most_ops_of_a_tensor": max(len(tensor.pairs) for tensor in plan.tensors),
                }
            return result

        setattr(owner, name, wrapper)

    def result(self) -> dict[str, Any]:
        lines = Path("/proc/self/io").read_text().splitlines()
        counts = dict(line.split(": ") for line in lines)
        return {
            "peak_rss": peak_rss(),
            "pool_read": sum(pool.read_bytes for pool in self.pools),
            "pool_written": sum(pool.written_bytes for pool in self.pools),
            "proc_read": int(counts["rchar"]),
            "proc_written": int(counts["wchar"]),
            "phases": self.phases,
            **self.plan,
        }


def peak_rss() -> int:
    """Return the peak resident memory of this program since its start.

    ``getrusage`` won't do: its peak survives exec, so it has the parent's memory in it.
    """
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+([0-9]+) kB", status)
    return int(match[1]) * 1024 if match else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# --- the table --------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Write the result for people."""
    state, start = result["state_bytes"], result["version_rss_bytes"]
    budget = f"memory budget {result['memory_bytes'] / 2**20:.0f} MiB"
    lines = [
        f"{state / 1e9:.2f} GB of state: {result['model']}",
        f"{result['cpus']} CPUs, load {result['load']:.1f} at the start, {result['rounds']} rounds",
        f"{budget}; `ckpttools --version` takes {start / 2**20:.0f} MiB",
    ]
    for name, kinds in result["jobs"].items():
        lines += ["", name, f"  {'':9}{'wall s':>8} (min to max){'CPU s':>9}{'GB/CPU s':>10}"]
        lines[-1] += f"{'x cp':>7}{'x cp+fsync':>12}{'reads':>8}{'writes':>8}{'extra RSS':>12}"
        for kind, row in kinds.items():
            line = f"  {kind:9}{row['wall']:8.2f} ({row['wall_min']:.2f} to {row['wall_max']:.2f})"
            line += f"{row['cpu']:8.2f}{row['gb_per_cpu_second']:10.2f}"
            line += f"{row['ratio_to_cp']:7.2f}{row['ratio_to_cp_fsync']:12.2f}"
            if "ops" in row:
                line += f"{row['reads_per_state']:8.2f}{row['writes_per_state']:8.2f}"
                line += f"{row['extra_rss_bytes'] / 2**20:8.0f} MiB"
            lines.append(line)
        row = kinds["reshard"]
        most = row["most_ops_of_a_tensor"]
        lines += [
            f"  plan: {row['ops']} copies of {row['tensors']} tensors (at most {most} of one)",
            f"  planning: {row['plan_seconds']:.2f} s",
            "  phases, wall/CPU s: "
            + ", ".join(f"{k} {w:.2f}/{c:.2f}" for k, (w, c) in row["phases"].items()),
        ]
    lines += ["", "reads and writes: bytes that the product moved, per byte of state"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""What does a conversion that is killed leave behind? Nothing, or what can be gone on with.

A synthetic checkpoint is converted again and again by the command line, and each run is killed
(SIGKILL) after a random time. After each kill:

1. the destination is absent, or the old one, or the new one, whole in every byte;
2. the same command without ``--resume`` refuses to go on with unfinished work, and names it;
3. with ``--resume`` (which is killed too, now and then) it ends with the very files of a run that
   nobody disturbed, and writes no tile again that was finished;
4. nothing is left beside the destination.

    python benchmarks/kill.py --kills 100 --size 1GB
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from itertools import cycle
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # an uninstalled checkout will do

import numpy as np
import synthetic
from reshard import size_of

from ckpttools import api
from ckpttools.cli.main import cli
from ckpttools.errors import CkptError, StorageError

COMMAND = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {sys.path[0]!r}); from ckpttools.cli.main import main; main()",
]
JOBS = {
    "reshard": ["reshard", "--tp", "1", "--pp", "2", "--dp", "3"],
    "gather": ["gather"],
    "overwrite": ["reshard", "--tp", "1", "--pp", "2", "--dp", "3", "--overwrite"],
}
FROM_START = 0.2
"""So many kills fall anywhere in a run; the others after it has begun to write."""

KILLED_AGAIN = 0.3
"""So many runs that resume are killed as well."""

Listing = dict[str, str]


class BrokenError(Exception):
    """A law of this module's docstring did not hold."""


@dataclass(slots=True)
class Outcome:
    """What one killed run led to."""

    job: str
    seconds: float
    kills: int = 0
    finished: bool = False
    step: str = "start"
    published: bool = False
    tiles: int = 0
    refused: bool = False


@dataclass(slots=True)
class Reference:
    """An undisturbed run: its files, how long it took, and when it began to write."""

    files: Listing
    seconds: float
    write_at: float
    arguments: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=size_of, default=10**9, help="bytes of state: 1GB")
    parser.add_argument("--kills", type=int, default=100, help="runs to kill (default 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the random times (default 0)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckpttools-kill-") as name:
        result = measure(Path(name), options)
    print(json.dumps(result, indent=2) if options.json else table(result))
    if result["broken"]:
        sys.exit(1)


def measure(place: Path, options: argparse.Namespace) -> dict[str, object]:
    """Make the source and the undisturbed results, kill run after run, and count."""
    model = synthetic.shape_of_size(options.size)
    source, old, out = place / "source", place / "old", place / "work" / "out"
    synthetic.write_checkpoint(source, model, tp=2, pp=1, dp=2)
    api.strip(source, old)
    out.parent.mkdir()
    references = {}
    for job, arguments in JOBS.items():
        full = [*arguments, str(source), str(out)]
        references[job] = undisturbed(out, full, old if job == "overwrite" else None)
    rng = np.random.default_rng(options.seed)
    broken: list[str] = []
    outcomes: list[Outcome] = []
    for number, job in zip(range(options.kills), cycle(JOBS), strict=False):
        try:
            outcomes.append(one(out, job, references[job], old, rng))
        except BrokenError as error:
            broken.append(f"run {number} ({job}): {error}")
        clear(out.parent)
    return {**summary(outcomes), "state_bytes": model.state_bytes, "broken": broken}


def undisturbed(out: Path, arguments: list[str], old: Path | None) -> Reference:
    """Convert once and note the files."""
    if old is not None:
        lay(old, out)
    child = start(arguments)
    started = time.monotonic()
    write_at = 0.0
    for line in lines_of(child):
        if line.startswith("write:") and not write_at:
            write_at = time.monotonic() - started
    if child.wait():
        sys.exit(f"{' '.join(arguments)}: must succeed, got exit code {child.returncode}")
    result = Reference(listing(out), time.monotonic() - started, write_at, arguments)
    clear(out.parent)
    return result


def one(out: Path, job: str, reference: Reference, old: Path, rng: np.random.Generator) -> Outcome:
    """Kill one run, look at what is there, and bring it to its end."""
    old_files: Listing = {}
    if job == "overwrite":
        lay(old, out)
        old_files = listing(out)
    outcome = Outcome(job, 0.0)
    killed(reference, reference.arguments, outcome, rng)
    while not outcome.finished:
        outcome.published = check_whole(out, old_files, reference.files)
        known = tiles_known(out)
        outcome.tiles = max(outcome.tiles, known)
        if outcome.published and job != "overwrite":
            break
        if known:
            check_refused(out, reference.arguments)
            outcome.refused = True
        resume = [*reference.arguments, "--resume"]
        if rng.random() < KILLED_AGAIN:
            killed(reference, resume, outcome, rng)
        else:
            check_resumed(resume, known)
            outcome.finished = True
    if listing(out) != reference.files:
        raise BrokenError(f"{out}: must hold the files of an undisturbed run, got others")
    beside = sorted(p.name for p in out.parent.iterdir() if p != out)
    if outcome.finished and beside:
        raise BrokenError(f"{out}: must stand alone, got {', '.join(beside)}")
    return outcome


def killed(
    reference: Reference, arguments: list[str], outcome: Outcome, rng: np.random.Generator
) -> None:
    """Run and kill after a random time; a run that was faster than that is finished."""
    child = start(arguments)
    span = reference.seconds
    if rng.random() >= FROM_START:
        span -= reference.write_at
        for line in lines_of(child):
            if line.startswith("write:"):
                break
    try:
        child.wait(timeout=float(rng.uniform(0, span)))
        outcome.finished = True
    except subprocess.TimeoutExpired:
        child.kill()
        outcome.kills += 1
    said = [line.split(":")[0] for line in lines_of(child)]
    outcome.step = said[-1] if said else "write"
    if child.wait() not in (0, -9):
        raise BrokenError(f"{' '.join(arguments)}: must succeed, got {child.returncode}: {said}")


def check_whole(out: Path, old: Listing, new: Listing) -> bool:
    """Say whether the new destination is there; it is whole, or the old one, or absent."""
    found = listing(out)
    if found == old:
        return False
    if found != new:
        raise BrokenError(f"{out}: must be the old one or the new one, got neither")
    result = api.verify(out)
    if not result.ok:
        raise BrokenError(f"{out}: must be sound, got {result.damage or result.differences}")
    return True


def tiles_known(out: Path) -> int:
    """Return how many tiles the journal holds, if the directory that it is about is there."""
    for journal in out.parent.glob(".out.partial-*.journal"):
        if journal.with_suffix("").is_dir():
            return max(0, journal.read_bytes().count(b"\n") - 1)
    return 0


def check_refused(out: Path, arguments: list[str]) -> None:
    """Hold that unfinished work is named where nobody asks to go on with it."""
    partial = next(p for p in out.parent.glob(".out.partial-*") if p.is_dir())
    try:
        call(arguments)
    except StorageError as error:
        if not str(error).startswith(f"{partial}: unfinished work") or "--resume" not in error.hint:
            raise BrokenError(f"{partial}: must be named, got {error}") from error
    else:
        raise BrokenError(f"{partial}: must be refused without --resume, got a result")


def check_resumed(arguments: list[str], known: int) -> None:
    """Hold that a run which resumes succeeds and takes over every finished tile."""
    try:
        notes = json.loads(call([*arguments, "--json"]))["findings"]
    except CkptError as error:
        raise BrokenError(f"--resume: must succeed, got {error}") from error
    note = f"resumed: {known} tiles of an earlier run were still right"
    if known and note not in notes:
        raise BrokenError(f"--resume: must take over {known} tiles, got {notes}")


def call(arguments: list[str]) -> str:
    """Run the command line in this process and return what it prints."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()):
        cli.main(arguments, standalone_mode=False)
    return out.getvalue()


# --- processes and files ----------------------------------------------------------------


def start(arguments: list[str]) -> subprocess.Popen[str]:
    """Start the command line; its messages can be read."""
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def lines_of(child: subprocess.Popen[str]) -> Iterator[str]:
    """Yield what a process says, as it says it."""
    if child.stderr is not None:
        yield from iter(child.stderr.readline, "")


def listing(root: Path) -> Listing:
    """Return the SHA-256 of every file under ``root``, by path; none if it isn't there."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[str(path.relative_to(root))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def lay(old: Path, out: Path) -> None:
    """Put a checkpoint there that is to be overwritten; it shares its files, which none changes."""
    shutil.copytree(old, out, copy_function=lambda src, dst: Path(dst).hardlink_to(src))


def clear(place: Path) -> None:
    """Remove everything in a directory."""
    for path in list(place.iterdir()):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


# --- the outcome ------------------------------------------------------------------------


def summary(outcomes: list[Outcome]) -> dict[str, object]:
    """Count what the kills hit and what was found."""
    return {
        "runs": len(outcomes),
        "kills": sum(o.kills for o in outcomes),
        "jobs": Counter(o.job for o in outcomes),
        "steps": Counter(o.step for o in outcomes if o.kills),
        "refused": sum(o.refused for o in outcomes),
        "resumed": sum(o.tiles > 0 for o in outcomes),
        "tiles": sum(o.tiles for o in outcomes),
        "published_before": sum(o.published for o in outcomes),
    }


def table(result: dict[str, object]) -> str:
    """Write the summary for people."""
    rows = {
        "state of the checkpoint": f"{float(str(result['state_bytes'])) / 1e9:.2f} GB",
        "runs": result["runs"],
        "kills": result["kills"],
        "runs by job": result["jobs"],
        "last step that a killed run told of": result["steps"],
        "left finished tiles": result["resumed"],
        "finished tiles taken over": result["tiles"],
        "refused without --resume": result["refused"],
        "had published before the kill": result["published_before"],
    }
    lines = []
    for name, value in rows.items():
        counts = value.items() if isinstance(value, dict) else ()
        lines.append(f"{name}: {', '.join(f'{k} {n}' for k, n in counts) or value}")
    broken = result["broken"]
    lines += [f"BROKEN: {line}" for line in broken] if isinstance(broken, list) else []
    return "\n".join(lines if broken else [*lines, "every law held"])


if __name__ == "__main__":
    main()

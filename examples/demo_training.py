"""Train a small GPT on 4 ranks, save, reshard to 3 ranks, go on: and see that nothing changed.

The second part of ``make demo``. It needs torch (CPU is enough), takes about a minute, and exits
non-zero if anything is not as it must be. Two witnesses judge it:

* one process that trains with torch's own AdamW and nothing of ckpttools: its loss curve;
* what the 4 ranks saved: the resharded checkpoint must hold the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ckpttools import api

SCRIPT = Path(__file__).resolve().parent / "train_gpt.py"
TOLERANCE = 5e-4
"""How far losses may lie apart: four ranks add in another order than one process does."""


class DemoError(Exception):
    """Something is not as it must be."""


def train(ranks: int, *options: str) -> list[float]:
    """Show and run the training script; return the loss of each step.

    Raises:
        DemoError: it failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as losses:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command = [sys.executable, *(launcher if ranks else []), str(SCRIPT), *options]
        shown = f"torchrun --nproc-per-node {ranks}" if ranks else "python"
        print("$", shown, "examples/train_gpt.py", *options, flush=True)
        done = subprocess.run(
            [*command, "--losses", losses.name], check=False, capture_output=True, text=True
        )
        if done.returncode:
            raise DemoError(f"training must end well, got {done.stdout}{done.stderr}")
        found: list[float] = json.loads(Path(losses.name).read_text())
    print(f"  {len(found)} steps, loss {found[0]:.4f} -> {found[-1]:.4f}\n", flush=True)
    return found


def demonstrate(work: Path, before: int, after: int, first: int, last: int) -> None:
    """Run both halves, on ``before`` and ``after`` ranks, and hold them against one process.

    Raises:
        DemoError: something is not as it must be.
    """
    saved, resharded = work / f"run-{before}", work / f"run-{after}"
    head = train(before, "--steps", str(first), "--overlap", "--save", str(saved))
    print(f"$ ckpttools reshard {saved.name} {resharded.name} --dp {after}", flush=True)
    report = api.reshard(saved, resharded, target=api.Target(dp=after))
    print("".join(f"  {line}\n" for line in report.proof), flush=True)
    comparison = api.diff(saved, resharded)
    if not comparison.equal or not comparison.compared:
        raise DemoError("what is loaded must be what was saved, got a difference")
    tail = train(after, "--steps", str(last), "--load", str(resharded))
    whole = train(0, "--steps", str(last), "--reference")
    ours = [*head, *tail]
    if len(ours) != len(whole):
        raise DemoError(f"{len(whole)} steps must be taken, got {len(ours)}")
    apart = max(abs(a - b) for a, b in zip(ours, whole, strict=True))
    fell = whole[0] - whole[-1]
    print(
        f"largest distance from one process with torch's AdamW: {apart:.6f} (loss fell {fell:.3f})"
    )
    if not apart <= TOLERANCE < fell:
        raise DemoError(f"losses must lie within {TOLERANCE} of one process's, got {apart}")


def main() -> int:
    """Run the demonstration; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=int, default=4, help="ranks that save (4)")
    parser.add_argument("--after", type=int, default=3, help="ranks that go on (3)")
    parser.add_argument("--first", type=int, default=20, help="steps before the save (20)")
    parser.add_argument("--last", type=int, default=40, help="last step behind it (40)")
    options = parser.parse_args()
    started = time.perf_counter()
    print(f"\n== Train on {options.before} ranks, reshard to {options.after}, go on ==\n")
    with tempfile.TemporaryDirectory(prefix="ckpttools-demo-") as work:
        try:
            demonstrate(Path(work), options.before, options.after, options.first, options.last)
        except DemoError as error:
            print(f"\nNOT as it must be: {error}", file=sys.stderr)
            return 1
    print(f"\nAll as it must be, in {time.perf_counter() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What does a sharded optimizer step cost beside torch's own ways to train in parallel?

Two gloo ranks of one thread each train about 50 million parameters with trivial compute (see
optimizer_variants.py). What is compared is a whole iteration, zeroed gradients to updated
parameters, minus the same iteration without communication and update. Every variant has its own
processes, alive for the whole run; in each round they take turns, so that noise falls on all
alike, and ratios are taken within a round.

    python benchmarks/optimizer.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # an uninstalled checkout will do

import optimizer_variants
import torch
import torch.distributed as dist
from ranks import Answer, Ranks, join, serve

OURS = "ours"
# Masters and moments, in bytes a parameter; where parameters are fp32 they are the masters.
STATE_BYTES = {"fp32": 8, "bf16": 12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--layers", type=int, default=12, help="default 12")
    parser.add_argument("--width", type=int, default=2048, help="default 2048: 50.4M parameters")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--iterations", type=int, default=3, help="timed in a round (default 3)")
    parser.add_argument("--variants", help="only these, separated by semicolons")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(**json.loads(options.child))
        return
    precisions = ("fp32", "bf16") if options.precision == "both" else (options.precision,)
    result = {
        "parameters": options.layers * options.width * (options.width + 1),
        "ranks": options.ranks,
        "rounds": options.rounds,
        "iterations": options.iterations,
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "skipped": skipped(options.variants),
        "precisions": {precision: measure(precision, options) for precision in precisions},
    }
    print(json.dumps(result, indent=2) if options.json else table(result))


# --- measuring --------------------------------------------------------------------------


def measure(precision: str, options: argparse.Namespace) -> Answer:
    """Let all variants of a precision take turns, and sum up."""
    variants = chosen(precision, options.variants)
    rounds: dict[str, list[Answer]] = {variant: [] for variant in variants}
    with ExitStack() as stack:
        teams = {}
        for variant in variants:
            arguments = {
                "variant": variant,
                "precision": precision,
                "layers": options.layers,
                "width": options.width,
            }
            teams[variant] = stack.enter_context(Ranks(__file__, arguments, ranks=options.ranks))
            teams[variant].ask(iterations=2)  # state is made in the first step
        for _ in range(options.rounds):
            for variant in variants:
                answers = teams[variant].ask(iterations=options.iterations)
                rounds[variant].append(one_round(answers))
        memory = {variant: teams[variant].ask(memory=True) for variant in variants}
    floor = rounds["compute"]
    return {
        variant: summary(rounds[variant], floor, rounds.get(OURS))
        | memory_summary(memory[variant], precision, options)
        for variant in variants
    }


def chosen(precision: str, names: str | None) -> tuple[str, ...]:
    """Return the variants to run; compute, which is taken off, is always among them."""
    absent = optimizer_variants.absent()
    known = tuple(name for name in optimizer_variants.VARIANTS[precision] if name not in absent)
    if names is None:
        return known
    wanted = split(names)
    unknown = set(wanted) - {name for all_ in optimizer_variants.VARIANTS.values() for name in all_}
    if unknown:
        sys.exit(f"--variants: must be of {'; '.join(known)}, got {min(unknown)}")
    return tuple(name for name in known if name in {"compute", *wanted})


def skipped(names: str | None) -> list[str]:
    """Return the variants that were wanted, and can't run for what isn't installed."""
    absent = optimizer_variants.absent()
    return sorted(absent if names is None else absent & set(split(names)))


def split(names: str) -> list[str]:
    return [name.strip() for name in names.split(";")]


def one_round(answers: list[Answer]) -> Answer:
    """Sum up a round: an iteration takes as long as the slowest rank, and the CPU of all."""
    walls = zip(*(answer["wall"] for answer in answers), strict=True)
    cpus = zip(*(answer["cpu"] for answer in answers), strict=True)
    return {
        "wall": statistics.median(max(wall) for wall in walls),
        "cpu": statistics.median(sum(cpu) for cpu in cpus),
    }


def summary(rounds: list[Answer], floor: list[Answer], ours: list[Answer] | None) -> Answer:
    """Return median and extremes over rounds, in seconds; ratios are ours to this variant's."""
    walls = [each["wall"] for each in rounds]
    result = {
        "wall": spread(walls),
        "cpu": spread([each["cpu"] for each in rounds]),
        "rounds": rounds,
    }
    costs = [each["wall"] - base["wall"] for each, base in zip(rounds, floor, strict=True)]
    if rounds is floor:
        return result
    result["cost"] = spread(costs)
    if ours is not None:
        own = [each["wall"] - base["wall"] for each, base in zip(ours, floor, strict=True)]
        result["ours_to_this"] = spread([a / b for a, b in zip(own, costs, strict=True)])
        whole = [each["wall"] for each in ours]
        result["ours_to_this_whole"] = spread([a / b for a, b in zip(whole, walls, strict=True)])
    return result


def spread(values: list[float]) -> list[float]:
    """Return median, least and greatest."""
    return [statistics.median(values), min(values), max(values)]


def memory_summary(answers: list[Answer], precision: str, options: argparse.Namespace) -> Answer:
    """Return the largest of each figure over ranks, and the state against the formula."""
    parameters = options.layers * options.width * (options.width + 1)
    share = STATE_BYTES[precision] * parameters / options.ranks
    most = {key: max(answer[key] for answer in answers) for key in answers[0]}
    return {**most, "state_to_formula": most["state_bytes"] / share}


# --- one rank ---------------------------------------------------------------------------


def train(
    *, variant: str, precision: str, layers: int, width: int, rank: int, ranks: int, meeting: str
) -> None:
    """Be a rank of a variant: train when asked, and tell how long each iteration took."""
    join(rank, ranks, meeting)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.AdamW([weight], fused=True).step()  # torch imports 90 MB of itself in the first
    optimizer_variants.prepare(variant)
    before = resident("VmRSS")
    training = optimizer_variants.make(variant, precision, layers, width)

    def answer(question: Answer) -> Answer:
        if "memory" in question:
            return {
                "state_bytes": optimizer_variants.state_bytes(training.optimizer),
                "live_bytes": optimizer_variants.live_bytes(),
                "backward_bytes": optimizer_variants.peak_live_bytes(training),
                "rss_bytes": resident("VmRSS") - before,
                "peak_rss_bytes": resident("VmHWM") - before,
            }
        training.iterate()  # wakes what slept while the others had their turn
        dist.barrier()
        walls, cpus = [], []
        for _ in range(question["iterations"]):
            wall, cpu = time.perf_counter(), time.process_time()
            training.iterate()
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        return {"wall": walls, "cpu": cpus}

    serve(answer)
    dist.destroy_process_group()


def resident(key: str) -> int:
    """Return resident memory (VmRSS) or its peak (VmHWM), in bytes."""
    match = re.search(rf"{key}:\s+([0-9]+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


# --- the table --------------------------------------------------------------------------


def table(result: Answer) -> str:
    """Write the result for people."""
    lines = [
        f"{result['parameters'] / 1e6:.1f}M parameters, {result['ranks']} ranks of one thread",
        f"{result['cpus']} CPUs, load {result['load']:.1f} at the start, torch {result['torch']}",
        f"{result['rounds']} rounds; in each, the median of {result['iterations']} iterations",
    ]
    if result["skipped"]:
        lines.append(f"skipped, not installed: {'; '.join(result['skipped'])} (see `make peers`)")
    head = f"{'ms':>21}{'whole':>18}{'cost':>18}{'ours/this':>19}{'CPU':>7}"
    head += f"{'state':>9}{'/formula':>9}{'live':>8}{'backward':>9}{'RSS':>8}{'peak':>8}"
    for precision, rows in result["precisions"].items():
        lines += ["", precision, head]
        lines += [row_of(variant, row) for variant, row in rows.items()]
    lines += [
        "",
        "cost: whole iteration minus compute; ours/this: ratio of costs within a round;",
        "state, live tensors, the most of them in a backward pass, resident memory: MB on the",
        "fullest rank; (least to greatest)",
    ]
    return "\n".join(lines)


def row_of(variant: str, row: Answer) -> str:
    blank = " " * 18
    line = f"  {variant:19}{milliseconds(row['wall'])}"
    line += milliseconds(row["cost"]) if "cost" in row else blank
    line += ratios(row["ours_to_this"]) if "ours_to_this" in row else blank + " "
    line += f"{row['cpu'][0] * 1e3:7.0f}{megabytes(row['state_bytes']):>9}"
    line += f"{row['state_to_formula']:9.3f}" if row["state_bytes"] else f"{'':9}"
    for key in ("live_bytes", "backward_bytes", "rss_bytes", "peak_rss_bytes"):
        line += megabytes(row[key]).rjust(9 if key == "backward_bytes" else 8)
    return line


def milliseconds(values: list[float]) -> str:
    middle, least, most = (f"{value * 1e3:.0f}" for value in values)
    return f"{middle:>6}{f' ({least} to {most})':<12}"


def ratios(values: list[float]) -> str:
    middle, least, most = (f"{value:.2f}" for value in values)
    return f"{middle:>5}{f' ({least} to {most})':<14}"


def megabytes(size: Any) -> str:
    return f"{size / 1e6:.0f}"


if __name__ == "__main__":
    main()

"""How much of a training step does overlapped communication hide?

Two gloo ranks of one thread each train a plain network whose steps take real computing. The
machine's loopback is too fast to make communication matter, so the benchmark runs in a network
namespace of its own, whose loopback passes a token bucket (``tc … tbf``). Its rate is set, in the
same run, so that without overlap communication takes about a third of a step. Then both variants
take turns; what overlap hides is the part of the step's time that it saves, within a round.

    python benchmarks/optimizer_overlap.py --rounds 7

Where network namespaces are not permitted it says so, and does nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parent.parent))  # an uninstalled checkout will do

import torch
import torch.distributed as dist
from ranks import Answer, Ranks, join, serve
from torch import Tensor, nn

from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig
from ckpttools.optimizer.collectives import Collectives, Work, collectives_for

SHARE = (0.30, 0.37)  # of the step, that communication must take where it is not overlapped
AIM = 0.335
UNSHAPED = 20e9  # bits a second: more than the loopback gives
QUEUE = 64 << 20  # bytes; more than TCP has under way, so that nothing is ever dropped
NAMESPACES = (  # the first needs no privileges, the second is for root where users get none
    ("unshare", "--user", "--map-root-user", "--net"),
    ("unshare", "--net"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12, help="default 12")
    parser.add_argument("--width", type=int, default=1024, help="default 1024: 12.6M parameters")
    parser.add_argument("--batch", type=int, default=384, help="rows a rank (default 384)")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--iterations", type=int, default=3, help="timed in a round (default 3)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(**json.loads(options.child))
    elif options.inside:
        result = measure(options)
        print(json.dumps(result, indent=2) if options.json else table(result))
    else:
        enter(options)


# --- the namespace ----------------------------------------------------------------------


def enter(options: argparse.Namespace) -> None:
    """Run this script in a network namespace; it ends with its processes."""
    reason = "unshare, ip and tc must be installed"
    if all(shutil.which(tool) for tool in ("unshare", "ip", "tc")):
        for namespace in NAMESPACES:
            trial = [*namespace, sys.executable, "-c", TRIAL]
            done = subprocess.run(trial, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                command = [*namespace, sys.executable, *sys.argv, "--inside"]
                sys.exit(subprocess.run(command, check=False).returncode)
            reason = done.stderr.strip().rpartition("\n")[2]
    skipped = {"skipped": f"no network namespace with a shaper is permitted here: {reason}"}
    print(json.dumps(skipped) if options.json else f"skipped: {skipped['skipped']}")


TRIAL = """
import subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run("tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 1s".split(), check=True)
"""


def shape(rate: float) -> None:
    """Let the loopback pass ``rate`` bits a second; both directions of all ranks share it."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)  # noqa: S607  # from PATH
    burst = max(256 * 1024, int(rate / 8 / 250))  # what a timer tick of 4 ms must let pass
    burst = min(burst, (1 << 32) - 1 - QUEUE)  # tc counts in 32 bits
    limits = ["rate", f"{rate:.0f}bit", "burst", str(burst), "limit", str(burst + QUEUE)]
    subprocess.run(["tc", "qdisc", "replace", "dev", "lo", "root", "tbf", *limits], check=True)  # noqa: S607


# --- measuring --------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> Answer:
    """Set the rate, then let both variants take turns."""
    load = os.getloadavg()[0]
    shape(UNSHAPED)
    arguments = {"layers": options.layers, "width": options.width, "batch": options.batch}
    with ExitStack() as stack:
        off, on = (
            stack.enter_context(
                Ranks(__file__, {**arguments, "overlap": overlap}, ranks=options.ranks)
            )
            for overlap in (False, True)
        )
        rate, tries = calibrate(off, options)
        rounds: list[Answer] = []
        for _ in range(options.rounds):
            pair: Answer = {"off": one_round(off, options), "on": one_round(on, options)}
            pair["hidden"] = 1 - pair["on"]["wall"] / pair["off"]["wall"]
            pair["share"] = pair["off"]["waited"] / pair["off"]["wall"]
            rounds.append(pair)
    return {
        "parameters": parameters(options),
        "ranks": options.ranks,
        "rounds": rounds,
        "iterations": options.iterations,
        "cpus": os.cpu_count(),
        "load": load,
        "torch": torch.__version__,
        "rate_bits": rate,
        "calibration": tries,
        **{
            f"{kind}_{key}": spread([pair[kind][key] for pair in rounds])
            for kind in ("off", "on")
            for key in ("wall", "waited")
        },
        "share": spread([pair["share"] for pair in rounds]),
        "hidden": spread([pair["hidden"] for pair in rounds]),
    }


def calibrate(off: Ranks, options: argparse.Namespace) -> tuple[float, list[Answer]]:
    """Find the rate at which communication without overlap takes its share of a step.

    What is on the wire is known, so the first rate is near; each measurement corrects it.
    """
    one_round(off, options)
    free = one_round(off, options)
    computing = free["wall"] - free["waited"]
    tries: list[Answer] = [{"rate_bits": None, **free}]
    wanted = computing * AIM / (1 - AIM)
    # Each rank sends (N-1)/N of the gradients and of the parameters, four bytes each.
    rate = 8 * (options.ranks - 1) * 2 * 4 * parameters(options) / wanted
    for _ in range(5):
        shape(rate)
        tried = one_round(off, options)
        tries.append({"rate_bits": rate, **tried})
        share = tried["waited"] / tried["wall"]
        if abs(share - AIM) < 0.015:
            break
        computing = tried["wall"] - tried["waited"]
        rate *= tried["waited"] / (computing * AIM / (1 - AIM))
    return rate, tries


def one_round(team: Ranks, options: argparse.Namespace) -> Answer:
    """Return the time of a step and what of it was spent waiting, on the slowest rank."""
    answers = team.ask(iterations=options.iterations)
    return {key: max(answer[key] for answer in answers) for key in ("wall", "waited")}


def parameters(options: argparse.Namespace) -> int:
    return int(options.layers * options.width * (options.width + 1))


def spread(values: list[float]) -> list[float]:
    """Return median, least and greatest."""
    return [statistics.median(values), min(values), max(values)]


# --- one rank ---------------------------------------------------------------------------


class WaitingTime:
    """Another group's collectives; counts the time that the caller spends in them."""

    def __init__(self, inner: Collectives) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size
        self.seconds = 0.0

    def reduce_scatter(self, buffer: Tensor) -> Work:
        return self._issue(self.inner.reduce_scatter, buffer)

    def all_gather(self, buffer: Tensor) -> Work:
        return self._issue(self.inner.all_gather, buffer)

    def all_reduce(self, tensor: Tensor, op: Literal["sum", "max"] = "sum") -> None:
        started = time.perf_counter()
        self.inner.all_reduce(tensor, op)
        self.seconds += time.perf_counter() - started

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)  # what a step doesn't use

    def _issue(self, operation: Callable[[Tensor], Work], buffer: Tensor) -> Work:
        started = time.perf_counter()
        work = operation(buffer)
        self.seconds += time.perf_counter() - started
        return TimedWork(self, work)


class TimedWork:
    def __init__(self, owner: WaitingTime, work: Work) -> None:
        self.owner, self.work = owner, work

    def wait(self) -> None:
        started = time.perf_counter()
        self.work.wait()
        self.owner.seconds += time.perf_counter() - started


def train(
    *, layers: int, width: int, batch: int, overlap: bool, rank: int, ranks: int, meeting: str
) -> None:
    """Be a rank: train when asked, and tell how long a step took."""
    join(rank, ranks, meeting)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))
    )
    config = OptimizerConfig(
        lr=1e-4,
        clip_grad=0.0,
        use_distributed_optimizer=True,
        bucket_size=width * width if overlap else None,  # a bucket a layer
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        overlap_param_gather_with_optimizer_step=overlap,
    )
    waiting = WaitingTime(collectives_for(None, torch.device("cpu")))
    optimizer = DistributedOptimizer(model, config, collectives=waiting)
    data = torch.randn(batch, width, generator=torch.Generator().manual_seed(rank))

    def iterate() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    def answer(question: Answer) -> Answer:
        iterate()  # wakes what slept; with overlap it leaves gathers open, as the last one does
        dist.barrier()
        started, waited = time.perf_counter(), waiting.seconds
        for _ in range(question["iterations"]):
            iterate()
        count = question["iterations"]
        return {
            "wall": (time.perf_counter() - started) / count,
            "waited": (waiting.seconds - waited) / count,
        }

    serve(answer)
    dist.destroy_process_group()


# --- the table --------------------------------------------------------------------------


def table(result: Answer) -> str:
    """Write the result for people."""
    share, hidden = result["share"], result["hidden"]
    lines = [
        f"{result['parameters'] / 1e6:.1f}M parameters fp32, {result['ranks']} ranks of one thread",
        f"{result['cpus']} CPUs, load {result['load']:.1f} at the start, torch {result['torch']}",
        f"loopback shaped to {result['rate_bits'] / 1e9:.2f} Gbit/s",
        f"{len(result['rounds'])} rounds of {result['iterations']} iterations",
        "",
        f"{'':12}{'step ms':>22}{'of it waiting ms':>24}",
    ]
    for kind in ("off", "on"):
        wall, waited = milliseconds(result[f"{kind}_wall"]), milliseconds(result[f"{kind}_waited"])
        lines.append(f"overlap {kind:4}{wall:>22}{waited:>24}")
    lines += [
        "",
        f"communication's share without overlap: {percent(share)}",
        f"share of the step that overlap hides:  {percent(hidden)}",
    ]
    if not SHARE[0] <= share[0] <= SHARE[1]:
        lines.append(
            f"communication must take {SHARE[0]:.0%} to {SHARE[1]:.0%} of a step for this to count"
        )
    return "\n".join(lines)


def milliseconds(values: list[float]) -> str:
    middle, least, most = (f"{value * 1e3:.0f}" for value in values)
    return f"{middle} ({least} to {most})"


def percent(values: list[float]) -> str:
    middle, least, most = (f"{value * 100:.1f}" for value in values)
    return f"{middle} % ({least} to {most})"


if __name__ == "__main__":
    main()

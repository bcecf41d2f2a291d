"""What does saving cost a training run, now and behind it?

Two gloo ranks of one thread each hold about 1 GB of weights and Adam state between them, cut in
halves. In each round every way to save it takes its turn, on the same disk: a raw write of the
same bytes, our synchronous and asynchronous saves, and torch's DCP ``save`` and ``async_save`` of
the same tensors as DTensors. What a save costs the training thread is told in units of one warm
copy of the same bytes in memory, taken in the same round. While an asynchronous save is written,
training steps go on (matrix products and a small all-reduce), and are timed; so they are while a
thread does nothing but write as many bytes to the disk, which is what the machine itself takes.

    python benchmarks/save.py --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # an uninstalled checkout will do

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Answer, Ranks, join, serve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from ckpttools.hooks.manager import CheckpointManager
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig, ParallelGroups

WAYS = (
    "copy",
    "raw",
    "raw, behind",
    "ours, now",
    "ours, behind",
    "ours, behind Python",
    "DCP save",
    "DCP async_save",
)
LOADS = ("ours, restore", "ours, verified", "DCP load")
BLOCK_BYTES = 8 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=20, help="default 20")
    parser.add_argument("--width", type=int, default=2048, help="default 2048: 1 GB of state")
    parser.add_argument("--ranks", type=int, default=2, help="default 2")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--step", type=int, default=6, help="matrix products a step (default 6)")
    parser.add_argument("--directory", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(**json.loads(options.child))
        return
    result = measure(options)
    print(json.dumps(result, indent=2) if options.json else table(result))


def measure(options: argparse.Namespace) -> Answer:
    """Let all ways take turns for some rounds, and sum them up."""
    rounds: list[dict[str, Answer]] = []
    with tempfile.TemporaryDirectory(prefix="ckpttools-save-", dir=options.directory) as place:
        arguments = {
            "layers": options.layers,
            "width": options.width,
            "step": options.step,
            "directory": place,
        }
        with Ranks(__file__, arguments, ranks=options.ranks) as ranks:
            size = sum(answer["bytes"] for answer in ranks.ask(do="size"))
            ranks.ask(do="save on one")
            for name in WAYS:  # memory, connections and code are there from now on
                ranks.ask(do=name)
            for _ in range(options.rounds):
                rounds.append({name: joined(ranks.ask(do=name)) for name in (*WAYS, *LOADS)})
    return {
        "bytes": size,
        "ranks": options.ranks,
        "rounds": rounds,
        "summary": summary(rounds),
    }


def joined(answers: list[Answer]) -> Answer:
    """Return the times of the slowest rank, and the processor time of all."""
    return {
        key: (sum if key == "cpu" else max)(answer[key] for answer in answers) for key in answers[0]
    }


def summary(rounds: list[dict[str, Answer]]) -> dict[str, list[float]]:
    """Return each ratio as median, least and greatest; taken within a round."""

    def ratio(way: str, key: str, to: str, to_key: str) -> list[float]:
        found = [one[way][key] / one[to][to_key] for one in rounds]
        return [statistics.median(found), min(found), max(found)]

    return {
        "stall, ours / copy": ratio("ours, behind", "stall", "copy", "stall"),
        "stall, DCP async_save / copy": ratio("DCP async_save", "stall", "copy", "stall"),
        "now / stall, ours": ratio("ours, now", "stall", "ours, behind", "stall"),
        "durable behind / now, ours": ratio("ours, behind", "durable", "ours, now", "durable"),
        "durable behind Python / now, ours": ratio(
            "ours, behind Python", "durable", "ours, now", "durable"
        ),
        "step during the write / without": ratio("ours, behind", "step", "ours, behind", "without"),
        "step during a raw write / without": ratio("raw, behind", "step", "raw, behind", "without"),
        "step during DCP's write / without": ratio(
            "DCP async_save", "step", "DCP async_save", "without"
        ),
        "now, ours / DCP save": ratio("ours, now", "durable", "DCP save", "durable"),
        "now, ours / raw": ratio("ours, now", "durable", "raw", "durable"),
        "CPU of restore, DCP / ours": ratio("DCP load", "cpu", "ours, restore", "cpu"),
    }


def table(result: Answer) -> str:
    lines = [f"{result['bytes'] / 1e9:.2f} GB over {result['ranks']} ranks", ""]
    lines.append(f"{'seconds':<40}{'median':>9}{'least':>9}{'most':>9}")
    for way in (*WAYS, *LOADS):
        for key in result["rounds"][0][way]:
            found = [one[way][key] for one in result["rounds"]]
            name = f"{way}: {key}"
            lines.append(
                f"{name:<40}{statistics.median(found):>9.3f}{min(found):>9.3f}{max(found):>9.3f}"
            )
    lines += ["", f"{'ratio, taken within a round':<40}{'median':>9}{'least':>9}{'most':>9}"]
    for name, (median, least, most) in result["summary"].items():
        lines.append(f"{name:<40}{median:>9.2f}{least:>9.2f}{most:>9.2f}")
    return "\n".join(lines)


# --- a rank -----------------------------------------------------------------------------


class Rank:
    """Holds the state, and saves it in every way."""

    def __init__(self, rank: int, layers: int, width: int, step: int, directory: Path) -> None:
        self.rank = rank
        self.directory = directory
        self.width, self.layers = width, layers
        self.model, self.optimizer = self.fresh(None)
        self.alone = dist.new_group([0])
        self.for_dcp = dist.new_group()
        self.tensors = [
            tensor
            for shard in self.optimizer.shards
            for tensor in (shard.bucket.local_params, *shard.slots().values())
        ]
        for tensor in self.tensors:
            tensor.data.uniform_(-1, 1)
        self.a, self.b = torch.rand(2, 512, 512)
        self.products = step
        self.turns = 0
        self.number = 0
        self.manager = CheckpointManager(
            directory / "behind", keep_last=1, preemption_signals=(), overwrite=True
        )
        self.now = CheckpointManager(
            directory / "now", keep_last=1, asynchronous=False, preemption_signals=()
        )
        self.manager.prepare(self.model, self.optimizer)
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.state = {
            str(i): DTensor.from_local(
                tensor.detach().clone(), self.mesh, [Shard(0)], run_check=False
            )
            for i, tensor in enumerate(self.tensors)
        }

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(self.layers))

    @property
    def size_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def train(self) -> float:
        """Take one step of training; return its time."""
        started = time.perf_counter()
        for _ in range(self.turns):
            pass  # holds Python's lock all the time
        for _ in range(self.products if not self.turns else 0):
            self.b = torch.mm(self.a, self.b) * (1 / 256)
        dist.all_reduce(torch.zeros(1))
        return time.perf_counter() - started

    def steps(self, goes_on: Callable[[], bool]) -> tuple[float, int]:
        """Train until no rank wants more; return the mean time of a step, and their number."""
        times: list[float] = []
        while True:
            times.append(self.train())
            more = torch.tensor([int(goes_on())])
            dist.all_reduce(more, dist.ReduceOp.MAX)
            if not int(more):
                return statistics.fmean(times), len(times)

    def quiet(self) -> None:
        """Wait until the disk has nothing to do, and all ranks are here."""
        gc.collect()  # an optimizer and its hooks refer to each other
        dist.barrier()
        if self.rank == 0:
            os.sync()
        dist.barrier()

    def baseline(self) -> float:
        count = iter(range(20))
        return self.steps(lambda: next(count) < 19)[0]

    def behind(self, begin: Callable[[], Callable[[], bool]], end: Callable[[], object]) -> Answer:
        """Time a save that goes on behind the training, and the steps meanwhile."""
        before = self.baseline()
        self.quiet()
        started = time.perf_counter()
        under_way = begin()
        stall = time.perf_counter() - started
        step, count = self.steps(under_way)
        end()
        durable = time.perf_counter() - started
        before = (before + self.baseline()) / 2
        return {"stall": stall, "durable": durable, "without": before, "step": step, "steps": count}

    def answer(self, question: Mapping[str, object]) -> Answer:
        way = str(question["do"])
        if way == "size":
            return {"bytes": self.size_bytes}
        self.quiet()
        self.number += 1
        place = self.directory / f"{way}-{self.number}"
        return {
            "copy": self.copy,
            "raw": lambda: self.timed(lambda: self.write_raw(place)),
            "raw, behind": lambda: self.raw_behind(place),
            "ours, now": lambda: self.timed(
                lambda: self.now.save(self.number, self.model, self.optimizer)
            ),
            "ours, behind": self.ours_behind,
            "ours, behind Python": self.ours_behind_python,
            "DCP save": lambda: self.timed(lambda: dcp.save(self.state, checkpoint_id=place)),
            "DCP async_save": lambda: self.dcp_behind(place),
            "ours, restore": lambda: self.restore(verify=False),
            "ours, verified": lambda: self.restore(verify=True),
            "DCP load": self.dcp_load,
            "save on one": self.save_on_one,
        }[way]()

    def timed(self, save: Callable[[], object]) -> Answer:
        started = time.perf_counter()
        save()
        seconds = time.perf_counter() - started
        self.forget()
        return {"stall": seconds, "durable": seconds}

    def forget(self) -> None:
        """Remove what was written, but for what is loaded later."""
        dist.barrier()
        if self.rank == 0:
            for path in (*self.directory.glob("raw-*"), *self.directory.glob("DCP*-*")):
                shutil.rmtree(path)
        dist.barrier()

    def copy(self) -> Answer:
        copies = [part.to_local() for part in self.state.values()]
        started = time.perf_counter()
        for copy, tensor in zip(copies, self.tensors, strict=True):
            copy.copy_(tensor.detach())
        return {"stall": time.perf_counter() - started}

    def write_raw(self, place: Path) -> None:
        place.mkdir(exist_ok=True)
        with (place / str(self.rank)).open("wb", buffering=0) as file:
            for tensor in self.tensors:
                data = memoryview(tensor.detach().view(torch.uint8).numpy().data)
                for low in range(0, len(data), BLOCK_BYTES):
                    file.write(data[low : low + BLOCK_BYTES])
            os.fsync(file.fileno())
        dist.barrier()

    def raw_behind(self, place: Path) -> Answer:
        """Let a thread write memory to the disk past the page cache: what the machine asks for."""
        image = mmap.mmap(-1, self.size_bytes // BLOCK_BYTES * BLOCK_BYTES)
        for low in range(0, len(image), mmap.PAGESIZE):
            image[low] = 1

        def write() -> None:
            place.mkdir(exist_ok=True)
            flags = os.O_CREAT | os.O_WRONLY | getattr(os, "O_DIRECT", 0)
            descriptor = os.open(place / str(self.rank), flags)
            with memoryview(image) as view:
                for low in range(0, len(view), BLOCK_BYTES):
                    os.pwrite(descriptor, view[low : low + BLOCK_BYTES], low)
            os.fsync(descriptor)
            os.close(descriptor)

        thread = threading.Thread(target=write)

        def begin() -> Callable[[], bool]:
            thread.start()
            return thread.is_alive

        found = self.behind(begin, thread.join)
        image.close()
        self.forget()
        return found

    def ours_behind(self) -> Answer:
        def begin() -> Callable[[], bool]:
            self.manager.save(self.number, self.model, self.optimizer)
            write = self.manager._writer._under_way
            return lambda: write is not None and write.running

        return self.behind(begin, self.manager.wait)

    def ours_behind_python(self) -> Answer:
        self.turns = 2_000_000
        try:
            return self.ours_behind()
        finally:
            self.turns = 0

    def dcp_behind(self, place: Path) -> Answer:
        futures = []

        def begin() -> Callable[[], bool]:
            group = self.for_dcp  # its thread must not meet the training's messages
            futures.append(dcp.async_save(self.state, checkpoint_id=place, process_group=group))
            return lambda: not futures[0].done()

        def end() -> None:
            futures[0].result()

        found = self.behind(begin, end)
        self.forget()
        return found

    def save_on_one(self) -> Answer:
        """Save all of it on one rank, for the others to cut."""
        if self.rank == 0:
            _, optimizer = self.fresh(self.alone)
            with self.at("one") as manager:
                manager.save(1, nn.Identity(), optimizer)
            tensors = [
                tensor.detach()
                for shard in optimizer.shards
                for tensor in (shard.bucket.local_params, *shard.slots().values())
            ]
            state = {str(i): tensor for i, tensor in enumerate(tensors)}
            dcp.save(state, checkpoint_id=self.directory / "one-dcp", no_dist=True)
        return {}

    def fresh(self, group: dist.ProcessGroup | None) -> tuple[nn.Module, DistributedOptimizer]:
        model = self.build()
        config = OptimizerConfig(lr=1e-3, clip_grad=0.0)
        return model, DistributedOptimizer(model, config, groups=ParallelGroups(dp=group))

    def at(self, name: str) -> CheckpointManager:
        return CheckpointManager(self.directory / name, asynchronous=False, preemption_signals=())

    def restore(self, *, verify: bool) -> Answer:
        """Load what one rank saved on all of them, each its part."""
        model, optimizer = self.fresh(None)
        with self.at("one") as manager:
            return self.cpu(lambda: manager.restore(model, optimizer, verify=verify))

    def dcp_load(self) -> Answer:
        parts = {
            name: DTensor.from_local(
                torch.zeros_like(tensor.to_local()), self.mesh, [Shard(0)], run_check=False
            )
            for name, tensor in self.state.items()
        }
        return self.cpu(lambda: dcp.load(parts, checkpoint_id=self.directory / "one-dcp"))

    @staticmethod
    def cpu(work: Callable[[], object]) -> Answer:
        started, used = time.perf_counter(), time.process_time()
        work()
        return {"wall": time.perf_counter() - started, "cpu": time.process_time() - used}


def child(rank: int, ranks: int, meeting: str, directory: str, **sizes: int) -> None:
    join(rank, ranks, meeting)
    this = Rank(rank, directory=Path(directory), **sizes)
    serve(this.answer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

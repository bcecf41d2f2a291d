"""Train a small GPT with its optimizer sharded over any number of ranks; save, and go on.

    torchrun --nproc-per-node 4 examples/train_gpt.py --steps 100 --save run-4
    ckpttools reshard run-4 run-3 --dp 3
    torchrun --nproc-per-node 3 examples/train_gpt.py --steps 200 --load run-3

The sequences of a step depend on the seed and the step alone, and are dealt out to the ranks like
cards. Each rank weighs its loss by its share, so the mean over ranks is the mean over the batch:
the loss curve is that of one process, whatever the number of ranks, but for rounding. With
``--reference`` one process trains with torch's own AdamW and nothing of ckpttools.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, Shape
from torch import Tensor

from ckpttools.hooks import load_sharded, save_sharded
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

TEXT = Path(__file__).resolve().parent / "text" / "alice.txt"
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
CLIP = 1.0
WARMUP = 20  # steps


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those that train together."""

    rank: int
    ranks: int

    @classmethod
    def join(cls) -> Team:
        """Join the other ranks if torchrun started this process, else be alone."""
        if "RANK" not in os.environ:
            return cls(0, 1)
        dist.init_process_group("gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def mean(self, value: Tensor) -> float:
        """Return the mean of a scalar over the ranks."""
        total = value.detach().double()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item() / self.ranks


def main() -> None:
    options = parse()
    team = Team.join()
    try:
        losses = train(options, team)
    finally:
        team.leave()
    if options.losses and team.rank == 0:
        Path(options.losses).write_text(json.dumps(losses))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="train up to this step (100)")
    parser.add_argument("--batch", type=int, default=12, help="sequences a step, all ranks (12)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (0.003)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the sequences (0)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--overlap", action="store_true", help="communicate during computation")
    parser.add_argument("--save", metavar="DIR", help="write a checkpoint after the last step")
    parser.add_argument("--load", metavar="DIR", help="go on from a checkpoint")
    parser.add_argument("--losses", metavar="FILE", help="write the loss of each step, as JSON")
    parser.add_argument("--reference", action="store_true", help="torch's AdamW, one process")
    options = parser.parse_args()
    if options.reference and (options.save or options.load or options.precision != "fp32"):
        parser.error("--reference must be alone: fp32, and neither --save nor --load")
    return options


# --- training ---------------------------------------------------------------------------


def train(options: argparse.Namespace, team: Team) -> list[float]:
    """Run the steps that are left; return the loss of each, as it was before its update.

    Raises:
        SystemExit: there are more ranks than sequences, or several for the reference.
    """
    if team.ranks > (1 if options.reference else options.batch):
        sys.exit(f"--batch: must be at least the number of ranks, got {team.ranks} ranks")
    model = GPT(Shape(), options.seed)
    if options.precision == "bf16":
        model.bfloat16()
    optimizer = reference(model, options) if options.reference else sharded(model, options)
    first = 1
    if options.load and isinstance(optimizer, DistributedOptimizer):
        first = resume(options.load, optimizer) + 1
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    losses = []
    started = time.perf_counter()
    for step in range(first, options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, options.lr)
        tokens, targets = sequences(text, model.shape.context, step, options, team)
        optimizer.zero_grad()
        share = len(tokens) * team.ranks / options.batch
        loss = model.loss(tokens, targets) * share
        loss.backward()
        if options.reference:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(team.mean(loss))
        if team.rank == 0:
            print(f"step {step}  loss {losses[-1]:.6f}", flush=True)
    if team.rank == 0 and losses:
        each = (time.perf_counter() - started) / len(losses)
        print(f"{team.ranks} ranks, {each * 1000:.0f} ms a step", flush=True)
    if options.save and isinstance(optimizer, DistributedOptimizer):
        save(options.save, optimizer, max(options.steps, first - 1))
    return losses


def lr_at(step: int, highest: float) -> float:
    """Return the learning rate: a linear rise, then a fall with the root of the step."""
    return highest * min(step / WARMUP, math.sqrt(WARMUP / step))


def sequences(
    text: Tensor, length: int, step: int, options: argparse.Namespace, team: Team
) -> tuple[Tensor, Tensor]:
    """Return this rank's sequences of a step, and the bytes that follow: int64 [own, length]."""
    generator = torch.Generator().manual_seed(options.seed << 32 | step)
    starts = torch.randint(len(text) - length, (options.batch,), generator=generator)
    own = starts[team.rank :: team.ranks]
    windows = text[own[:, None] + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]


# --- optimizers and checkpoints ---------------------------------------------------------


def reference(model: GPT, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Return torch's own AdamW."""
    return torch.optim.AdamW(
        model.parameters(),
        lr=options.lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        fused=True,
    )


def sharded(model: GPT, options: argparse.Namespace) -> DistributedOptimizer:
    """Return AdamW with masters and moments sharded over all ranks."""
    config = OptimizerConfig(
        lr=options.lr,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_eps=EPS,
        weight_decay=WEIGHT_DECAY,
        clip_grad=CLIP,
        bf16=options.precision == "bf16",
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap,
    )
    return DistributedOptimizer(model, config)


def save(directory: str, optimizer: DistributedOptimizer, step: int) -> None:
    """Write the checkpoint: each rank its own part, published once all are there."""
    save_sharded(directory, optimizer, iteration=step)


def resume(directory: str, optimizer: DistributedOptimizer) -> int:
    """Load weights and optimizer state, and return the step they were saved after."""
    restored = load_sharded(directory, optimizer)
    assert restored.step is not None
    return restored.step


if __name__ == "__main__":
    main()

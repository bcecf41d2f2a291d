"""Train a small network on any number of ranks so that killing it costs at most a few steps.

    torchrun --standalone --nproc-per-node 2 examples/train_resume.py run --steps 200

Kill it, by any means, and give the same command again: it goes on from the last step that was
saved, and ends with the same bits as a run that was never killed. After SIGTERM it saves first.
On another number of ranks it goes on as well, with the next samples, to the same but for rounding.

What is restored: weights and optimizer state (sharded over the ranks), the scheduler, the place in
the shuffled data, and the random generators, from which dropout draws. With ``--plain`` the
optimizer is torch's own AdamW under DistributedDataParallel. With ``--kill-at`` every rank kills
itself after that step.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ckpttools.hooks import CheckpointManager
from ckpttools.hooks.loader import ResumableLoader
from ckpttools.optimizer import DistributedOptimizer, OptimizerConfig

TEXT = Path(__file__).resolve().parent / "text" / "alice.txt"
CONTEXT = 16
BATCH = 12  # of all ranks


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Each 16 bytes of a text, and the byte that follows."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        return self.text[start : start + CONTEXT], self.text[start + CONTEXT]


def main() -> None:
    options = parse()
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
    try:
        train(options)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", help="where the checkpoints are, and go")
    parser.add_argument("--steps", type=int, default=200, help="train up to this step (200)")
    parser.add_argument("--every", type=int, default=5, help="save every so many steps (5)")
    parser.add_argument("--text", type=Path, default=TEXT, help="what to train on")
    parser.add_argument("--plain", action="store_true", help="torch's AdamW, replicated")
    parser.add_argument("--kill-at", type=int, metavar="STEP", help="as a failing machine would")
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """Take the steps that are left."""
    seed(0)  # the same weights on every rank
    model = network()
    optimizer, trained = plain(model) if options.plain else sharded(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) ** -0.5)
    loader = ResumableLoader(Windows(options.text.read_bytes()), BATCH)
    rank = dist.get_rank() if dist.is_initialized() else 0
    seed(1 + rank)  # for dropout: different on every rank
    with CheckpointManager(options.directory, keep_last=3, every_steps=options.every) as manager:
        step = 0
        if manager.latest() is not None:
            restored = manager.restore(trained, optimizer, scheduler, dataloader=loader)
            step = restored.step or 0
            tell(rank, f"goes on from step {step}", *restored.notes)
        while step < options.steps:
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(trained(inputs), targets)
                loss.backward()
                optimizer.step()
                scheduler.step()
                step += 1
                tell(rank, f"step {step}  loss {loss.item():.9f}")
                manager.save(
                    step,
                    trained,
                    optimizer,
                    scheduler,
                    dataloader=loader,
                    force=step == options.steps,
                )
                if manager.preempted:
                    tell(rank, f"saved step {step} before the end")
                    return
                if step == options.kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if step == options.steps:
                    break


def seed(number: int) -> None:
    """Set every random generator that is saved."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002  # it is the one that is saved
    torch.manual_seed(number)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Embedding(256, 8),
        nn.Flatten(),
        nn.Linear(8 * CONTEXT, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(64, 256),
    )


def sharded(model: nn.Module) -> tuple[torch.optim.Optimizer, nn.Module]:
    """Return AdamW with its state sharded over all ranks, and what is to be called."""
    config = OptimizerConfig(lr=0.01, weight_decay=0.1, use_distributed_optimizer=True)
    return DistributedOptimizer(model, config), model


def plain(model: nn.Module) -> tuple[torch.optim.Optimizer, nn.Module]:
    """Return torch's AdamW, and what is to be called."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    return optimizer, DistributedDataParallel(model) if dist.is_initialized() else model


def tell(rank: int, *lines: str) -> None:
    if rank == 0:
        for line in lines:
            print(line, flush=True)


if __name__ == "__main__":
    main()

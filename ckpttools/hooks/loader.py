"""Which samples has a run used, in terms that any number of ranks understands? Those of an epoch.

1. An epoch is a permutation of the dataset that follows from a seed and the epoch's number.
2. The batches of all ranks together are its consecutive stretches; each rank takes an equal part.
3. The position is the epoch and the samples of it that were handed out, over all ranks. So it is
   the same on every rank, and a run on another number of ranks goes on with the next sample.

Nothing is drawn from the global random generators, so a resumed run draws what it would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.ranks import Ranks

_FIXED = ("batch_sampler", "batch_size", "drop_last", "generator", "sampler", "shuffle")


class ResumableLoader:
    """Loads this rank's part of each batch; give it to ``CheckpointManager`` as ``dataloader``.

    ``batch_size`` is that of all ranks together. An iteration goes from where the run is to the end
    of the epoch; what is left of the dataset beyond the last whole batch is not used. ``options``
    are those of ``torch.utils.data.DataLoader``. A batch counts as used when it is handed out, not
    when a worker loads it ahead.

    ``rank`` of ``ranks`` are those of the default process group when an iteration begins, so a
    loader may be made before the group is; give them where fewer parts of a batch than ranks are
    wanted (tensor parallelism).

    Raises:
        UsageError: the batch can't be dealt evenly, is larger than the dataset, or an option is
            one that this loader decides.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        ranks: int | None = None,
        **options: Any,
    ) -> None:
        self._given = rank, ranks
        self.dataset = dataset
        self.size = len(dataset)  # type: ignore[arg-type]  # torch's Dataset declares no length
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self.samples = 0
        self._options = options
        self._check_dealt()
        if batch_size > self.size:
            raise UsageError(
                f"batch_size: must be at most the dataset's {self.size} samples, got {batch_size}"
            )
        if fixed := sorted(set(options) & set(_FIXED)):
            raise UsageError(f"options: must leave to this loader what it decides, got {fixed[0]}")

    @property
    def rank(self) -> int:
        """Which part of each batch is loaded here."""
        return Ranks().rank if self._given[0] is None else self._given[0]

    @property
    def ranks(self) -> int:
        """In how many parts a batch is dealt."""
        return Ranks().size if self._given[1] is None else self._given[1]

    def _check_dealt(self) -> None:
        if self.batch_size <= 0 or self.batch_size % self.ranks:
            raise UsageError(
                f"batch_size: must be a multiple of {self.ranks} ranks, got {self.batch_size}"
            )

    def __len__(self) -> int:
        """Return the batches of a whole epoch."""
        return self.size // self.batch_size

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from here to the end of the epoch; the next iteration is the next.

        Raises:
            UsageError: a process group was made since, among whose ranks a batch can't be dealt.
        """
        self._check_dealt()
        draws = torch.Generator().manual_seed(self._seed())
        batches = list(self._rest())
        loader: DataLoader[Any] = DataLoader(
            self.dataset, batch_sampler=batches, generator=draws, **self._options
        )
        for batch in loader:
            self.samples += self.batch_size
            if self.samples + self.batch_size > self.size:
                self.epoch, self.samples = self.epoch + 1, 0
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Return the position: the same on every rank."""
        return {
            "epoch": self.epoch,
            "samples": self.samples,
            "size": self.size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from a position, in the order that it was counted in.

        Raises:
            MismatchError: it is one in another dataset, or none of this kind of loader.
        """
        missing = sorted({"epoch", "samples", "seed", "shuffle", "size"} - set(state_dict))
        if missing:
            raise MismatchError(
                f"dataloader: must be the position of a ResumableLoader, got none of {missing[0]}"
            )
        if state_dict["size"] != self.size:
            raise MismatchError(
                f"dataloader: the dataset must have the {state_dict['size']} samples that it had, "
                f"got {self.size}"
            )
        self.epoch, self.samples = state_dict["epoch"], state_dict["samples"]
        self.seed, self.shuffle = state_dict["seed"], bool(state_dict["shuffle"])
        if self.samples + self.batch_size > self.size:  # batches were smaller before
            self.epoch, self.samples = self.epoch + 1, 0

    def _seed(self) -> int:
        return (self.seed * 1_000_003 + self.epoch) % 2**63

    def _rest(self) -> Iterator[list[int]]:
        """Yield this rank's indices of each batch that is left."""
        if self.shuffle:
            draws = torch.Generator().manual_seed(self._seed())
            order: list[int] = torch.randperm(self.size, generator=draws).tolist()
        else:
            order = list(range(self.size))
        rank, ranks = self.rank, self.ranks
        for start in range(self.samples, self.size - self.batch_size + 1, self.batch_size):
            yield order[start : start + self.batch_size][rank::ranks]

"""The resumable loader hands out each sample of an epoch once, on any ranks, with any stops."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import RankFailedError, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from ckpttools.errors import MismatchError, UsageError
from ckpttools.hooks.loader import ResumableLoader


class Numbers(Dataset[int]):
    """The numbers below ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def loaders(size: int, batch: int, ranks: int, **options: int) -> list[ResumableLoader]:
    return [
        ResumableLoader(Numbers(size), batch, rank=rank, ranks=ranks, **options)
        for rank in range(ranks)
    ]


def take(team: list[ResumableLoader], count: int) -> list[list[int]]:
    """Return the samples of the next batches, each of all ranks together, over epochs."""
    found: list[list[int]] = []
    while len(found) < count:
        for parts in zip(*team, strict=True):
            found.append(sorted(int(sample) for part in parts for sample in part))
            if len(found) == count:
                break
    return found


@settings(deadline=None)  # on a loaded machine the first loader is slow
@given(
    size=st.integers(12, 40),
    stop=st.integers(0, 12),
    before=st.sampled_from((1, 2, 3)),
    after=st.sampled_from((1, 2, 3, 6)),
    shuffle=st.booleans(),
)
def test_a_run_that_goes_on_with_any_number_of_ranks_sees_the_samples_that_one_sees_in_one_go(
    size: int, stop: int, before: int, after: int, shuffle: bool
) -> None:
    through = take(loaders(size, 6, 1, seed=5, shuffle=shuffle), 15)
    first = loaders(size, 6, before, seed=5, shuffle=shuffle)
    head = take(first, stop)
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    second = loaders(size, 6, after, seed=7, shuffle=not shuffle)
    for loader in second:
        loader.load_state_dict(states[0])
    assert head + take(second, 15 - stop) == through


def test_an_epoch_has_each_sample_of_whole_batches_once_and_the_next_another_order() -> None:
    (loader,) = loaders(23, 4, 1)
    first, second = ([int(n) for batch in loader for n in batch] for _ in range(2))
    assert len(first) == len(set(first)) == 20 == 4 * len(loader)
    assert first != second
    assert loader.state_dict() == {"epoch": 2, "samples": 0, "size": 23, "seed": 0, "shuffle": 1}


def test_the_last_batch_of_an_epoch_ends_it_before_the_loop_asks_for_another() -> None:
    (loader,) = loaders(8, 4, 1)
    positions = [(loader.epoch, loader.samples) for _ in loader]
    assert positions == [(0, 4), (1, 0)]


def test_smaller_batches_go_on_where_larger_ones_stopped() -> None:
    (large,) = loaders(20, 8, 1, shuffle=False)
    next(iter(large))
    (small,) = loaders(20, 3, 1, shuffle=False)
    small.load_state_dict(large.state_dict())
    assert take([small], 4) == [[8, 9, 10], [11, 12, 13], [14, 15, 16], [17, 18, 19]]


def test_loading_draws_nothing_from_the_global_generator() -> None:
    (loader,) = loaders(23, 4, 1)
    before = torch.get_rng_state()
    assert len(list(loader)) == 5
    assert torch.equal(torch.get_rng_state(), before)


def test_a_batch_that_cannot_be_dealt_a_foreign_option_and_another_dataset_are_refused() -> None:
    with pytest.raises(UsageError, match="batch_size: must be a multiple of 3 ranks, got 4"):
        loaders(23, 4, 3)
    with pytest.raises(UsageError, match="batch_size: must be at most the dataset's 3 samples"):
        loaders(3, 4, 1)
    with pytest.raises(UsageError, match="options: must leave to this loader .* got sampler"):
        ResumableLoader(Numbers(8), 4, sampler=None)
    (loader,), (other,) = loaders(8, 4, 1), loaders(9, 4, 1)
    with pytest.raises(MismatchError, match="dataset must have the 8 samples .* got 9"):
        other.load_state_dict(loader.state_dict())


def made_before_the_group(store: str, batch: int) -> list[list[int]]:
    """Make a loader as a script does, before a Trainer makes the process group."""
    loader = ResumableLoader(Numbers(9), batch, shuffle=False)
    assert (loader.rank, loader.ranks) == (0, 1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = dist.FileStore(f"{store}-ranks", 2).add("next", 1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=ranks - 1, world_size=2)
    try:
        found = [batch.tolist() for batch in loader]
        every: list[list[list[int]]] = [[], []]
        dist.all_gather_object(every, found)
        return [sorted(both) for both in zip(*every, strict=True)]
    finally:
        dist.destroy_process_group()


def test_a_loader_made_before_the_process_group_deals_each_batch_among_its_ranks(
    tmp_path: Path,
) -> None:
    store = str(tmp_path / "store")
    found = run_ranks(made_before_the_group, 2, store, 4, process_group=False)
    assert found == [[[[0, 2], [1, 3]], [[4, 6], [5, 7]]]] * 2
    with pytest.raises(RankFailedError, match="batch_size: must be a multiple of 2 ranks, got 3"):
        run_ranks(made_before_the_group, 2, f"{store}-odd", 3, process_group=False)


def test_a_state_of_another_kind_of_loader_is_refused() -> None:
    loader = ResumableLoader(Numbers(8), 4)
    with pytest.raises(MismatchError, match="position of a ResumableLoader, got none of epoch"):
        loader.load_state_dict({"samples": 4})
    assert loader.samples == 0

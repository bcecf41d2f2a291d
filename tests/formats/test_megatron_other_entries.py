"""What a rank file holds beside what we know is carried, compared, or named as left behind."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from megatron_edit import MODEL, copy_of, edit_all, edited, rank_files
from oracle_torch_files import read

from ckpttools import api
from ckpttools.api import Target
from ckpttools.errors import FormatError, UsageError


def with_entry(root: Path, **by_rank: int) -> Path:
    """Give the rank files of a copied fixture an entry ``mine``."""
    copy_of("gqa_tp2_pp1_dp2", root)
    for path in rank_files(root, MODEL):
        with edited(path) as tree:
            if path.parent.name in by_rank:
                tree["mine"] = by_rank[path.parent.name]
    return root


def test_an_unknown_entry_goes_along_where_all_ranks_agree(tmp_path: Path) -> None:
    source = with_entry(tmp_path / "source", mp_rank_00=7, mp_rank_01=7)
    api.reshard(source, tmp_path / "out", target=Target(tp=1))
    assert [read(path)["mine"] for path in rank_files(tmp_path / "out", MODEL)] == [7]


def test_an_unknown_entry_stays_with_its_rank_where_ranks_stay(tmp_path: Path) -> None:
    source = with_entry(tmp_path / "source", mp_rank_00=7, mp_rank_01=8)
    api.reshard(source, tmp_path / "out", target=Target(dp=3))
    assert [read(path)["mine"] for path in rank_files(tmp_path / "out", MODEL)] == [7, 8]


@pytest.mark.parametrize("by_rank", [{"mp_rank_00": 7, "mp_rank_01": 8}, {"mp_rank_01": 7}])
def test_an_unknown_entry_that_differs_is_refused_where_ranks_change(
    by_rank: dict[str, int], tmp_path: Path
) -> None:
    source = with_entry(tmp_path / "source", **by_rank)
    with pytest.raises(UsageError, match="mine: must be the same in all rank files where TP or PP"):
        api.reshard(source, tmp_path / "out", target=Target(tp=1))


def test_gather_names_an_entry_that_it_leaves_behind(tmp_path: Path) -> None:
    source = with_entry(tmp_path / "source", mp_rank_00=7, mp_rank_01=7)
    report = api.gather(source, tmp_path / "out")
    assert "mine: whole tensors have no place for it" in report.lost


def test_a_scaler_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    scales = iter((1.0, 2.0))

    def scale(tree: Any) -> None:
        tree["optimizer"]["grad_scaler"] = {"scale": next(scales)}

    source = edit_all(copy_of("gqa_tp2_pp1_dp2", tmp_path / "source"), MODEL, scale)
    message = re.escape("optimizer must be the same in all rank files but for its groups")
    with pytest.raises(FormatError, match=message):
        api.gather(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "note"),
    [
        (Target(dp=3), "buckets: cut as in the source (from storage offsets)"),
        (Target(tp=1), "buckets: one a buffer, since ranks or stages changed"),
        (Target(bucket_size=3600), "buckets: 3600 as asked"),
        (Target(bucket_size="none"), "buckets: none as asked"),
    ],
)
def test_the_report_says_which_buckets_the_files_are_for(
    target: Target, note: str, tmp_path: Path
) -> None:
    source = copy_of("gqa_tp2_pp1_dp2", tmp_path / "source")
    report = api.reshard(source, tmp_path / "out", target=target, dry_run=True)
    assert f"plan: {note}" in report.plan

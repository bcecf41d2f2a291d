"""How does an embedding that two stages share get a bucket of its own? It differs by release."""

from __future__ import annotations

import re

import pytest

from ckpttools.errors import LayoutError
from ckpttools.layout.megatron import VARIANTS, BufferParam, Cuts, buffer_layout


def test_a_shared_embedding_has_a_bucket_of_its_own() -> None:
    params = [
        BufferParam("emb", 100, shared_embedding=True),
        BufferParam("m", 70),
        BufferParam("out", 90, shared_embedding=True),
    ]
    layout = buffer_layout(params, dp=2, cuts=Cuts())
    assert layout.starts == (256, 128, 0)
    assert layout.bucket_starts == (0, 128, 256)
    # the bucket before a shared embedding keeps the alignment of its end: 128, not 70
    assert layout.bucket_unpadded == (90, 128, 100)
    assert layout.file_starts == (218, 90, 0)


def test_a_shared_embedding_that_comes_first_opens_no_empty_bucket() -> None:
    params = [BufferParam("m", 64), BufferParam("out", 128, shared_embedding=True)]
    for variant in VARIANTS.keys() - {"core-0.5"}:
        layout = buffer_layout(params, dp=2, cuts=Cuts(), variant=variant)
        assert layout.bucket_starts == (0, 128)


def test_before_core_0_6_a_shared_embedding_has_no_bucket_of_its_own() -> None:
    params = [
        BufferParam("emb", 100, shared_embedding=True),
        BufferParam("m", 70),
        BufferParam("out", 90, shared_embedding=True),
    ]
    old = buffer_layout(params, dp=7, cuts=Cuts(), variant="core-0.5")
    assert (old.bucket_starts, old.bucket_stops, old.bucket_unpadded) == ((0,), (266,), (260,))
    assert old.starts == old.file_starts == (160, 90, 0)
    later = buffer_layout(params, dp=7, cuts=Cuts(), variant="core-0.6")
    assert later.starts == (161, 91, 0)
    assert later.bucket_stops == (91, 161, 266)
    assert later.bucket_unpadded == (90, 70, 100)


def test_a_bucket_that_its_size_has_closed_is_not_closed_again_before_a_shared_embedding() -> None:
    params = [BufferParam("emb", 100, shared_embedding=True), BufferParam("m", 70)]
    for variant in VARIANTS:
        layout = buffer_layout(params, dp=2, cuts=Cuts(70), variant=variant)
        assert layout.bucket_unpadded == (70, 100)


def test_the_aligned_variants_agree_where_the_position_is_a_multiple_of_the_divisor() -> None:
    params = [BufferParam("emb", 100, shared_embedding=True), BufferParam("m", 256)]
    new, old = (
        buffer_layout(params, dp=2, cuts=Cuts(), variant=v) for v in ("core-0.13", "core-0.12")
    )
    assert new == old


def test_the_older_rule_counts_the_padding_as_content_where_dp_does_not_divide_the_position() -> (
    None
):
    params = [BufferParam("emb", 100, shared_embedding=True), BufferParam("m", 64)]
    new = buffer_layout(params, dp=3, cuts=Cuts(), variant="core-0.13")
    old = buffer_layout(params, dp=3, cuts=Cuts(), variant="core-0.12")
    assert new.starts == old.starts == (384, 0)
    assert new.bucket_unpadded == (64, 100)
    assert old.bucket_unpadded == (384, 100)
    assert old.file_starts == (384, 0)


def test_the_older_rule_is_refused_where_the_embedding_would_lie_in_two_buckets() -> None:
    params = [BufferParam("emb", 100, shared_embedding=True), BufferParam("m", 64)]
    message = "shared embedding: its start must be a multiple of 128 under this rule, got 64"
    with pytest.raises(LayoutError, match=re.escape(message)):
        buffer_layout(params, dp=2, cuts=Cuts(), variant="core-0.12")

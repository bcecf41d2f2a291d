"""Every bucket size there is must give one of the layouts that are listed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpttools.layout.megatron import VARIANTS, BufferParam, Cuts, buffer_layout, layouts_by_size


@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=7),
    st.integers(1, 5),
    st.sampled_from([name for name in VARIANTS if name != "core-0.12"]),
    st.integers(0, 3),
)
def test_the_listed_sizes_are_the_smallest_of_each_layout_and_none_is_missing(
    numels: list[int], dp: int, variant: str, shared: int
) -> None:
    params = [BufferParam(str(i), n, i == shared) for i, n in enumerate(numels)]
    expected = []
    for size in range(1, 64 * len(numels) + sum(numels) + 2):
        layout = buffer_layout(params, dp=dp, cuts=Cuts(size), variant=variant)
        if not expected or expected[-1][1] != layout:
            expected.append((Cuts(size), layout))
    assert list(layouts_by_size(params, dp=dp, variant=variant)) == expected

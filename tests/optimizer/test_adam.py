"""One call on pieces of parameters rounds as torch's optimizers do on whole parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ckpttools.errors import OptimizerError
from ckpttools.optimizer import adam
from ckpttools.optimizer.adam import (
    PIECE_ALIGNMENT,
    AdamSettings,
    Kernel,
    Pieces,
    adam_step,
    scratch_views,
)

STEPS = 20
# 33013 elements are shared between two threads; the others leave 0 to 15 in the last vector.
SIZES = (33013, 4099, 103, 17, 16, 7, 1)
SETTINGS = AdamSettings(lr=3e-3, beta1=0.85, beta2=0.97, eps=1e-7, weight_decay=0.3)

needs_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="without vector instructions the last elements round as all others",
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@dataclass
class State:
    """Whole parameters with their moments; `cut` gives views, so that a step changes these."""

    params: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]

    def equals(self, other: State) -> bool:
        return all(
            torch.equal(mine, its)
            for name in ("params", "exp_avgs", "exp_avg_sqs")
            for mine, its in zip(getattr(self, name), getattr(other, name), strict=True)
        )


def fresh(sizes: Sequence[int]) -> State:
    generator = torch.Generator().manual_seed(11)
    params = [torch.randn(size, generator=generator) for size in sizes]
    zeros = [torch.zeros(size) for size in sizes]
    return State(params, zeros, [zero.clone() for zero in zeros])


@functools.cache
def make_grads(sizes: tuple[int, ...], steps: int = STEPS) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(12)
    return [[torch.randn(size, generator=generator) for size in sizes] for _ in range(steps)]


def aligned_cuts(size: int, every: int = 5) -> list[int]:
    return list(range(0, size, every * PIECE_ALIGNMENT)) if size < 5000 else [0, 16, 16544]


def cut(tensors: Sequence[Tensor], cuts: Sequence[Sequence[int]]) -> list[Tensor]:
    return [
        tensor[start:stop]
        for tensor, starts in zip(tensors, cuts, strict=True)
        for start, stop in itertools.pairwise([*starts, tensor.numel()])
    ]


def cut_state(state: State, grads: Sequence[Tensor], cuts: Sequence[Sequence[int]]) -> Pieces:
    return Pieces(
        params=cut(state.params, cuts),
        grads=cut(grads, cuts),
        exp_avgs=cut(state.exp_avgs, cuts),
        exp_avg_sqs=cut(state.exp_avg_sqs, cuts),
    )


def learning_rate(step: int) -> float:
    return SETTINGS.lr * min(1.0, step / 5) * 0.9**step


def torch_run(
    settings: AdamSettings, flags: dict[str, bool], grads: Sequence[Sequence[Tensor]]
) -> State:
    """Run torch's own optimizer and scheduler on whole parameters."""
    start = fresh([grad.numel() for grad in grads[0]])
    params = [torch.nn.Parameter(param) for param in start.params]
    optimizer = (torch.optim.AdamW if settings.decoupled else torch.optim.Adam)(
        params,
        lr=1.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        **flags,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: learning_rate(n + 1))
    for step_grads in grads:
        for param, grad in zip(params, step_grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        scheduler.step()
    return State(
        [param.detach() for param in params],
        [optimizer.state[param]["exp_avg"] for param in params],
        [optimizer.state[param]["exp_avg_sq"] for param in params],
    )


def our_run(
    kernel: Kernel,
    settings: AdamSettings,
    grads: Sequence[Sequence[Tensor]],
    cuts: Sequence[Sequence[int]],
    grad_scale: Tensor | None = None,
) -> State:
    state = fresh([grad.numel() for grad in grads[0]])
    buffers = [torch.empty_like(grad) for grad in grads[0]]
    pieces = cut_state(state, buffers, cuts)
    for number, step_grads in enumerate(grads, start=1):
        for buffer, grad in zip(buffers, step_grads, strict=True):
            buffer.copy_(grad)
        now = replace(settings, lr=learning_rate(number))
        adam_step(kernel, pieces, now, [number] * len(pieces.params), grad_scale)
    return state


KERNELS: list[tuple[Kernel, dict[str, bool]]] = [
    ("fused", {"fused": True}),
    ("foreach", {"foreach": True}),
    ("foreach", {"foreach": False}),
]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kernel", "flags"), KERNELS)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("decoupled", [True, False])
def test_pieces_of_parameters_end_as_torchs_whole_parameters_bit_for_bit(
    kernel: Kernel, flags: dict[str, bool], decoupled: bool, weight_decay: float
) -> None:
    settings = replace(SETTINGS, decoupled=decoupled, weight_decay=weight_decay)
    grads = make_grads(SIZES)
    expected = torch_run(settings, flags, grads)
    assert not fresh(SIZES).equals(expected)
    assert our_run(kernel, settings, grads, [[0]] * len(SIZES)).equals(expected)
    assert our_run(kernel, settings, grads, [aligned_cuts(n) for n in SIZES]).equals(expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("kernel", "flags"), KERNELS)
@pytest.mark.parametrize("decoupled", [True, False])
def test_gradients_are_divided_by_the_scale_and_not_multiplied_by_its_reciprocal(
    kernel: Kernel, flags: dict[str, bool], decoupled: bool
) -> None:
    settings = replace(SETTINGS, decoupled=decoupled)
    grads, scale = make_grads((4099, 103), 3), torch.tensor(3.7)
    divided = [[grad / scale for grad in step] for step in grads]
    multiplied = [[grad * (1 / scale) for grad in step] for step in grads]
    ours = our_run(kernel, settings, grads, [aligned_cuts(4099), [0]], scale)
    assert ours.equals(torch_run(settings, flags, divided))
    assert not ours.equals(torch_run(settings, flags, multiplied))


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
def test_gradients_hold_the_quotient_afterwards(kernel: Kernel, decoupled: bool) -> None:
    grads = make_grads((103, 17), 1)[0]
    pieces = cut_state(fresh((103, 17)), [grad.clone() for grad in grads], [[0, 48], [0]])
    settings = replace(SETTINGS, decoupled=decoupled)
    adam_step(kernel, pieces, settings, [1, 1, 1], torch.tensor(3.7))
    quotients = cut([grad / 3.7 for grad in grads], [[0, 48], [0]])
    assert all(
        torch.equal(left, quotient)
        for left, quotient in zip(pieces.fp32_grads, quotients, strict=True)
    )
    before = [grad.clone() for grad in pieces.grads]
    adam_step(kernel, pieces, settings, [2, 2, 2])
    assert all(map(torch.equal, pieces.grads, before))


@needs_vectors
def test_a_cut_off_the_alignment_rounds_otherwise() -> None:
    grads = make_grads((4099,))
    expected = torch_run(SETTINGS, {"fused": True}, grads)
    assert our_run("fused", SETTINGS, grads, [[0, 2048]]).equals(expected)
    assert not our_run("fused", SETTINGS, grads, [[0, 2043]]).equals(expected)


@settings(deadline=None)
@given(
    size=st.integers(1, 400),
    kernel=st.sampled_from(["fused", "foreach"]),
    data=st.data(),
)
def test_any_aligned_cuts_give_the_same_bits(
    size: int, kernel: Kernel, data: st.DataObject
) -> None:
    inner = st.integers(1, max(1, (size - 1) // PIECE_ALIGNMENT)).map(PIECE_ALIGNMENT.__mul__)
    cuts = sorted({0, *(at for at in data.draw(st.lists(inner, max_size=5)) if at < size)})
    grads = make_grads((size,), 2)
    whole = our_run(kernel, SETTINGS, grads, [[0]])
    assert our_run(kernel, SETTINGS, grads, [cuts]).equals(whole)


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_each_piece_takes_its_own_step_number(kernel: Kernel) -> None:
    sizes, steps = (103, 17, 7), (4, 1, 9)
    grads = make_grads(sizes, 1)[0]
    together = fresh(sizes)
    adam_step(kernel, cut_state(together, grads, [[0]] * 3), SETTINGS, steps)
    alone = fresh(sizes)
    pieces = cut_state(alone, grads, [[0]] * 3)
    for i, step in enumerate(steps):
        one = Pieces(
            *(
                [tensors[i]]
                for tensors in (pieces.params, pieces.grads, pieces.exp_avgs, pieces.exp_avg_sqs)
            )
        )
        adam_step(kernel, one, SETTINGS, [step])
    assert together.equals(alone)
    adam_step(kernel, cut_state(swapped := fresh(sizes), grads, [[0]] * 3), SETTINGS, (1, 4, 9))
    assert torch.equal(swapped.params[2], together.params[2])
    assert not torch.equal(swapped.params[0], together.params[0])


def written_out(
    settings: AdamSettings, grads: Sequence[Tensor], start: Tensor, *, corrected: bool
) -> Tensor:
    """Adam as its paper has it, in double precision."""
    param, first, second = start.double(), torch.zeros(()), torch.zeros(())
    for number, grad32 in enumerate(grads, start=1):
        lr, grad = learning_rate(number), grad32.double()
        if settings.decoupled:
            param = param - lr * settings.weight_decay * param
        else:
            grad = grad + settings.weight_decay * param
        first = settings.beta1 * first + (1 - settings.beta1) * grad
        second = settings.beta2 * second + (1 - settings.beta2) * grad.square()
        mean = first / (1 - settings.beta1**number) if corrected else first
        square = second / (1 - settings.beta2**number) if corrected else second
        param = param - lr * mean / (square.sqrt() + settings.eps)
    return param


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("corrected", [True, False])
def test_the_update_is_the_papers_with_and_without_bias_correction(
    kernel: Kernel, decoupled: bool, corrected: bool
) -> None:
    settings = replace(SETTINGS, decoupled=decoupled, bias_correction=corrected)
    grads = make_grads((103,))
    ours = our_run(kernel, settings, grads, [[0]]).params[0].double()
    flat = [step[0] for step in grads]
    start = fresh((103,)).params[0]
    expected = written_out(settings, flat, start, corrected=corrected)
    other = written_out(settings, flat, start, corrected=not corrected)
    assert torch.allclose(ours, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(ours, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_a_first_step_without_correction_rounds_as_torchs_own_operations(kernel: Kernel) -> None:
    # Multiples of 2^-10 below 1, so that every product but the division and root is exact.
    grad = torch.arange(1, 18) / 1024
    param = torch.zeros(17)
    pieces = Pieces([param], [grad.clone()], [torch.zeros(17)], [torch.zeros(17)])
    settings = AdamSettings(
        lr=1.0, beta1=0.5, beta2=0.75, eps=0.0, weight_decay=0.0, bias_correction=False
    )
    adam_step(kernel, pieces, settings, [1])
    assert torch.equal(pieces.exp_avgs[0], grad / 2)
    assert torch.equal(pieces.exp_avg_sqs[0], grad.square() / 4)
    assert torch.equal(param, torch.full((17,), -1.0))


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [None, torch.tensor(3.0)])
def test_16_bit_gradients_are_widened_first_and_never_written(
    kernel: Kernel, dtype: torch.dtype, scale: Tensor | None
) -> None:
    halves = [grad.to(dtype) for grad in make_grads((103, 17), 1)[0]]
    kept = [half.clone() for half in halves]
    cuts = [[0, 48], [0]]
    memory = torch.full((200,), -7.0)
    mine, expected = fresh((103, 17)), fresh((103, 17))
    narrow = Pieces(
        cut(mine.params, cuts),
        cut(halves, cuts),
        cut(mine.exp_avgs, cuts),
        cut(mine.exp_avg_sqs, cuts),
        scratch_views(cut(halves, cuts), memory),
    )
    for number in (1, 2):
        adam_step(kernel, narrow, SETTINGS, [number] * 3, scale)
        wide = cut_state(expected, [half.float() for half in halves], cuts)
        adam_step(kernel, wide, SETTINGS, [number] * 3, scale)
        assert mine.equals(expected)
        assert all(map(torch.equal, narrow.fp32_grads, wide.fp32_grads))
    assert all(map(torch.equal, halves, kept))
    assert torch.equal(memory[120:], torch.full((80,), -7.0))


@pytest.mark.parametrize("kernel", adam.KERNELS)
def test_no_pieces_are_no_work(kernel: Kernel) -> None:
    adam_step(kernel, Pieces([], [], [], []), SETTINGS, [], torch.tensor(2.0))


@pytest.mark.parametrize("kernel", ["fused", "foreach"])
def test_a_piece_without_elements_changes_nothing_else(kernel: Kernel) -> None:
    grads = make_grads((103,), 1)
    alone = our_run(kernel, SETTINGS, grads, [[0]])
    state = fresh((103,))
    empty = [torch.zeros(0) for _ in range(4)]
    pieces = cut_state(state, [grads[0][0].clone()], [[0]])
    both = Pieces(
        [empty[0], *pieces.params],
        [empty[1], *pieces.grads],
        [empty[2], *pieces.exp_avgs],
        [empty[3], *pieces.exp_avg_sqs],
    )
    adam_step(kernel, both, replace(SETTINGS, lr=learning_rate(1)), [1, 1])
    assert state.equals(alone)


def test_masters_that_are_trained_views_are_updated_outside_autograd() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    pieces = Pieces([param], [torch.ones(4)], [torch.zeros(4)], [torch.zeros(4)])
    adam_step("foreach", pieces, SETTINGS, [1])
    assert param.is_leaf
    assert (param < 1).all()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "steps: must be 2 numbers, one per piece, got 0"),
        ([1, 2, 3], "steps: must be 2 numbers, one per piece, got 3"),
        ([1, 0], "steps: must be at least 1, got 0"),
    ],
)
def test_steps_count_from_one_and_there_is_one_per_piece(steps: list[int], message: str) -> None:
    pieces = cut_state(fresh((3, 5)), make_grads((3, 5), 1)[0], [[0], [0]])
    with pytest.raises(OptimizerError, match=message):
        adam_step("fused", pieces, SETTINGS, steps)
    assert torch.equal(pieces.params[0], fresh((3, 5)).params[0])

"""In whatever form masters and moments are kept, steps are exact or lose what the rule says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from torch import Tensor
from torch_reference import (
    Weights,
    assert_same_bits,
    exact_grads,
    mean_grads,
    require_vector_kernels,
    same_bits,
    weights,
)

from ckpttools.optimizer import DistributedFusedAdam, fused_shards
from ckpttools.optimizer.fused_shards import FusedPiece
from ckpttools.optimizer.kept import Scaled
from ckpttools.optimizer.remainders import join_master, split_master
from ckpttools.optimizer.scaled import decode, encode

BF16 = torch.bfloat16
STEPS = 4
SMALL = 600 * 4 / 2**20
SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
FORMS: dict[str, dict[str, Any]] = {
    "stored": {},
    "remainder": {
        "store_params": False,
        "store_param_remainders": True,
        "param_sync_dtype": BF16,
    },
    "weight": {"store_params": False},
    "scaled float16": {"with_scaled_states": True, "dtype": torch.float16},
    "scaled bfloat16": {
        "with_scaled_states": True,
        "dtype": BF16,
        "grad_sync_dtype": torch.float32,
    },
}

# Signs, zeros, subnormals, one, the last before a power of two, the largest, infinity, NaNs.
HIGHS = (0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0)
EDGES = np.array([high | sign for high in (*HIGHS, 0x7FFF) for sign in (0, 0x8000)], np.uint16)
LOWS = np.arange(1 << 16, dtype=np.uint16)


@pytest.fixture(autouse=True)
def _vector_kernels() -> None:
    require_vector_kernels()


def bits_of(tensor: Tensor, kind: type[Any]) -> np.ndarray[Any, Any]:
    """Return the pattern of each number."""
    return tensor.view(torch.uint8).numpy().view(kind)


def from_bits(bits: np.ndarray[Any, Any], dtype: torch.dtype) -> Tensor:
    """Return the numbers of these patterns."""
    return torch.from_numpy(bits.view(np.uint8).copy()).view(dtype)


def test_a_master_is_split_half_away_from_zero_and_joined_exactly_for_every_low_half() -> None:
    for high in EDGES:
        bits = (np.uint32(high) << np.uint32(16)) | LOWS.astype(np.uint32)
        master = from_bits(bits, torch.float32)
        weight, remainder = (
            torch.empty(1 << 16, dtype=BF16),
            torch.empty(1 << 16, dtype=torch.int16),
        )
        split_master(master, weight, remainder)
        rounded = ((bits.astype(np.uint64) + 0x8000) >> np.uint64(16)).astype(np.uint16)
        assert np.array_equal(bits_of(weight, np.uint16), rounded)
        assert np.array_equal(bits_of(remainder, np.uint16), LOWS)
        joined = torch.empty(1 << 16)
        join_master(weight, remainder, joined)
        assert np.array_equal(bits_of(joined, np.uint32), bits)


def test_a_half_is_rounded_away_from_zero_where_torch_rounds_it_to_even() -> None:
    master = from_bits(np.array([0x3F808000, 0xBF808000, 0x3F807FFF], np.uint32), torch.float32)
    weight, remainder = torch.empty(3, dtype=BF16), torch.empty(3, dtype=torch.int16)
    split_master(master, weight, remainder)
    assert bits_of(weight, np.uint16).tolist() == [0x3F81, 0xBF81, 0x3F80]
    assert bits_of(master.bfloat16(), np.uint16).tolist() == [0x3F80, 0xBF80, 0x3F80]
    assert remainder.tolist() == [-0x8000, -0x8000, 0x7FFF]


def test_every_remainder_joins_with_every_edge_pattern_as_the_formula_says() -> None:
    low = LOWS.view(np.int16)
    for high in EDGES:
        weight = from_bits(np.full(1 << 16, high, np.uint16), BF16)
        joined = torch.empty(1 << 16)
        join_master(weight, torch.from_numpy(low.copy()), joined)
        above = (np.full(1 << 16, high, np.uint16) - (low < 0).astype(np.uint16)).astype(np.uint32)
        expected = (above << np.uint32(16)) | LOWS.astype(np.uint32)
        assert np.array_equal(bits_of(joined, np.uint32), expected)


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
def test_scaled_numbers_take_half_the_range_of_their_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(1009, generator=torch.Generator().manual_seed(3)) * 1e-6
    kept, scale, back = torch.empty(1009, dtype=dtype), torch.empty(1), torch.empty(1009)
    encode(values, kept, scale)
    half = torch.finfo(dtype).max / 2
    # What bfloat16 would need is no normal fp32 number: the smallest one stands in.
    expected = max(float(np.float32(values.abs().max()) / np.float32(half)), 2.0**-126)
    assert float(scale) == pytest.approx(expected, rel=1e-6)
    assert same_bits(kept, (values / scale).to(dtype))
    decode(kept, scale, back)
    assert same_bits(back, kept.float() * scale)
    error = (back - values).abs().max() / values.abs().max()
    assert 0 < float(error) <= torch.finfo(dtype).eps


def test_numbers_that_are_all_zero_have_scale_zero_and_stay_zero() -> None:
    kept, scale, back = torch.ones(5).half(), torch.ones(1), torch.ones(5)
    encode(torch.zeros(5), kept, scale)
    decode(kept, scale, back)
    assert scale.item() == 0
    assert torch.equal(kept, torch.zeros(5).half())
    assert torch.equal(back, torch.zeros(5))


def test_scaled_state_is_never_cut() -> None:
    whole = Scaled(torch.zeros(4).half(), torch.zeros(1))
    assert whole.part(0, 4) is whole
    with pytest.raises(ValueError, match="must be taken whole, got elements 0 to 2 of 4"):
        whole.part(0, 2)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bf16_training_comes_to_the_masters_that_each_form_should_keep(ranks: int) -> None:
    run_ranks(_train, ranks, timeout_s=120)


def _train() -> None:
    for form, options in FORMS.items():
        for more in ({}, {"contiguous_param_buffer": True, "overlap_param_sync": True}):
            _train_one(form, {**options, **more})


def _train_one(form: str, options: dict[str, Any]) -> None:
    ranks = dist.get_world_size()
    model = weights(dtype=BF16)
    optimizer = DistributedFusedAdam(model, **SETTINGS, bucket_cap_mb=SMALL, **options)
    states = [_State(piece) for piece in optimizer.pieces]
    whole = _Whole(weights(dtype=BF16))
    for step in range(STEPS):
        optimizer.zero_grad()
        model(exact_grads(model, step, dist.get_rank())).backward()
        optimizer.step()
        grads = mean_grads(model, step, ranks)
        whole.step(grads)
        for state in states:
            state.step(grads, step + 1, _KEEP[form])
    optimizer.param_sync()
    for piece, state in zip(optimizer.pieces, states, strict=True):
        where = f"{form}: {piece.name} {piece.range.param}"
        for slot in ("exp_avg", "exp_avg_sq"):
            assert same_bits(piece.values(slot), state.slots[slot]), f"{where} {slot}"
        got = piece.values("fp32_param")
        assert same_bits(got, state.slots["fp32_param"]), where
        assert same_bits(piece.weight, _rounded(got, form)), where
        if form in ("stored", "remainder"):
            part = slice(piece.range.param.start, piece.range.param.end)
            assert same_bits(got, whole.masters[piece.name].view(-1)[part]), where
    assert {n: p for n, p in model.named_parameters() if p.numel()}.keys() == {
        n for n, m in whole.masters.items() if m.numel()
    }
    if form == "stored":
        for name, param in model.named_parameters():
            assert same_bits(param.detach(), whole.masters[name].bfloat16()), name


def _rounded(master: Tensor, form: str) -> Tensor:
    if form != "remainder":
        return master.bfloat16()
    bits = bits_of(master, np.uint32).astype(np.uint64) + 0x8000
    return from_bits((bits >> np.uint64(16)).astype(np.uint16), BF16)


class _Whole:
    """torch's AdamW on fp32 masters of whole parameters."""

    def __init__(self, model: Weights) -> None:
        self.masters = {n: p.detach().float() for n, p in model.named_parameters()}
        params = [torch.nn.Parameter(master) for master in self.masters.values()]
        self.params = dict(zip(self.masters, params, strict=True))
        self.optimizer = torch.optim.AdamW(params, **SETTINGS, fused=True)

    def step(self, grads: dict[str, Tensor]) -> None:
        for name, param in self.params.items():
            param.grad = grads[name]
        self.optimizer.step()


Keep = Callable[[Tensor], Tensor]


def _same(values: Tensor) -> Tensor:
    return values


def _through_weight(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def _through(dtype: torch.dtype) -> Keep:
    def keep(values: Tensor) -> Tensor:
        scale = values.abs().max() / (torch.finfo(dtype).max / 2)
        if scale == 0:
            return torch.zeros_like(values)
        scale = torch.clamp(scale, min=torch.finfo(torch.float32).tiny)
        return (values / scale).to(dtype).float() * scale

    return keep


# What becomes of (masters, moments) between two steps.
_KEEP: dict[str, tuple[Keep, Keep]] = {
    "stored": (_same, _same),
    "remainder": (_same, _same),
    "weight": (_through_weight, _same),
    "scaled float16": (_through(torch.float16),) * 2,
    "scaled bfloat16": (_through(BF16),) * 2,
}


class _State:
    """One piece's state, stepped by torch's kernel on fp32 and then kept by the documented rule."""

    def __init__(self, piece: FusedPiece) -> None:
        self.name, self.range = piece.name, piece.range.param
        self.slots = {
            "fp32_param": piece.values("fp32_param").clone(),
            "exp_avg": torch.zeros(self.range.size),
            "exp_avg_sq": torch.zeros(self.range.size),
        }

    def step(self, grads: dict[str, Tensor], number: int, keep: tuple[Keep, Keep]) -> None:
        grad = grads[self.name].reshape(-1)[self.range.start : self.range.end].clone()
        lists = [[self.slots[s]] for s in ("exp_avg", "exp_avg_sq")]
        torch._fused_adamw_(
            [self.slots["fp32_param"]],
            [grad],
            *lists,
            [],
            [torch.tensor(float(number))],
            lr=SETTINGS["lr"],
            beta1=SETTINGS["betas"][0],
            beta2=SETTINGS["betas"][1],
            weight_decay=SETTINGS["weight_decay"],
            eps=SETTINGS["eps"],
            amsgrad=False,
            maximize=False,
        )
        for slot, values in self.slots.items():
            self.slots[slot] = keep[slot != "fp32_param"](values)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("grads", [torch.float32, BF16])
def test_little_scratch_gives_the_same_bits_in_more_calls(
    form: str, grads: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"bucket_cap_mb": SMALL, **SETTINGS, **FORMS[form], "grad_sync_dtype": grads}
    found, calls = [], []
    for numel in (fused_shards.SCRATCH_NUMEL, 64):
        monkeypatch.setattr(fused_shards, "SCRATCH_NUMEL", numel)
        model = weights(dtype=BF16)
        optimizer = DistributedFusedAdam(model, **options)
        for step in range(2):
            optimizer.zero_grad()
            model(exact_grads(model, step, 0)).backward()
            optimizer.step()
        found.append([shard.slots() for shard in optimizer.shards])
        scratch = optimizer._scratch
        calls.append(sum(len(s.calls(lambda _: True, scratch)) for s in optimizer.shards))
        if numel == 64 and not form.startswith("scaled"):
            memory = (scratch.grads, *scratch.slots.values())
            assert max(tensor.numel() for tensor in memory) <= 64
    for left, right in zip(*found, strict=True):
        assert_same_bits(form, left, right)
    # Masters in place need no scratch for fp32 gradients; scaled pieces are never cut, and are
    # as large as a bucket unless 16-bit gradients make that twice as many elements.
    assert (calls[0] < calls[1]) == (form in ("remainder", "weight") or grads == BF16)


def test_scaled_pieces_are_batched_whole_and_in_order() -> None:
    optimizer = DistributedFusedAdam(weights(), bucket_cap_mb=SMALL)
    pieces = optimizer.pieces
    batches = fused_shards.whole_batches(pieces, 600)
    assert [piece for batch in batches for piece, _, _ in batch] == list(pieces)
    sizes = [[high - low for _, low, high in batch] for batch in batches]
    assert sizes == [[576], [433, 64, 64], [576], [507, 64], [193, 221, 1, 1, 7]]


NATIVE = {
    "stored": {"fp32_param": torch.float32},
    "remainder": {"param_remainder": torch.int16},
    "weight": {},
    "scaled float16": {"fp32_param": torch.float16, "fp32_param_scale": torch.float32},
    "scaled bfloat16": {"fp32_param": BF16, "fp32_param_scale": torch.float32},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_shard_holds_the_slots_that_it_describes_and_gives_back_what_is_put(form: str) -> None:
    model = weights(dtype=BF16)
    optimizer = DistributedFusedAdam(model, **SETTINGS, bucket_cap_mb=SMALL, **FORMS[form])
    layout = optimizer.describe()
    for shard in optimizer.shards:
        slots = shard.slots()
        described = dict(layout.slots["bfloat16"])
        assert described.pop("weight") == "bfloat16"
        assert {s: str(t.dtype).removeprefix("torch.") for s, t in slots.items()} == described
        assert {s: slots[s].dtype for s in slots if not s.startswith("exp")} == NATIVE[form]
        for slot, tensor in slots.items():
            count = len(shard.pieces) if slot.endswith("_scale") else shard.numel
            assert tensor.shape == (count,)
    generator = torch.Generator().manual_seed(5)
    for piece in optimizer.pieces:
        masters = () if form == "weight" else ("fp32_param",)
        assert piece.logical_slots() == (*masters, "exp_avg", "exp_avg_sq")
        for slot in piece.logical_slots():
            values = torch.randn(piece.range.param.size, generator=generator)
            piece.put(slot, values)
            expected = _KEEP[form][slot != "fp32_param"](values)
            assert same_bits(piece.values(slot), expected), (piece.name, slot)
        if form == "remainder":
            assert same_bits(piece.weight, _rounded(piece.values("fp32_param"), form))
    whole = {shard: shard.logical("exp_avg") for shard in optimizer.shards}
    for shard, flat in whole.items():
        for piece in shard.pieces:
            place = piece.range.gbuf_local
            assert same_bits(flat[place.start : place.end], piece.values("exp_avg"))
        filled = sum(piece.range.param.size for piece in shard.pieces)
        assert int((flat != 0).sum()) <= filled


@pytest.mark.parametrize("form", ["stored", "remainder", "scaled float16"])
def test_masters_are_made_anew_of_parameters_that_were_loaded(form: str) -> None:
    model = weights(dtype=BF16)
    optimizer = DistributedFusedAdam(model, **SETTINGS, bucket_cap_mb=SMALL, **FORMS[form])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(3)
    optimizer.reload_model_params()
    for piece in optimizer.pieces:
        expected = _KEEP[form][0](piece.weight.float())
        assert same_bits(piece.values("fp32_param"), expected), piece.name

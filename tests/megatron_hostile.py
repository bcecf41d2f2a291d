"""Which Megatron files must be refused, and with which words? One small file a rule.

``python tests/megatron_hostile.py`` writes them to ``fixtures/hostile/megatron``; the tests put
each in the place of a sound file, and compare what is committed with this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from megatron_edit import SLOTS, TINY_ARGS, flat_tensor, tiny_model, torch_bytes

from ckpttools.storage.inert import Inert, new_global

FOLDER = Path(__file__).parents[1] / "fixtures" / "hostile" / "megatron"
CANARY = "canary"  # the file that a pickle of this module makes, if it runs
BF16, FP32 = new_global("torch", "bfloat16"), new_global("torch", "float32")


def _slots(*, buckets: bool) -> dict[str, object]:
    """Return flat tensors as the versions before core 0.7 had them: whole, or a list a bucket."""
    flats = [flat_tensor(np.arange(i, i + 4)) for i in range(3)]
    return {name: [flat] if buckets else flat for name, flat in zip(SLOTS[1:], flats, strict=True)}


def _current(**changes: object) -> dict[object, object]:
    """Return the current version's tree with four elements a slot."""
    inner = {**_slots(buckets=False), "numel_unpadded": 4, **changes}
    return {"buckets_coalesced": True, 0: {(BF16, FP32): inner}}


def _one_storage() -> dict[object, object]:
    flat = flat_tensor(np.arange(4))
    return _current(exp_avg=flat, exp_avg_sq=flat)


OLD = "must be of the version with 'buckets_coalesced' .core 0.7 and later., got"
NUMBERED = "buffers must be numbered from 0, got"
OPTIMIZER_FILES: dict[str, tuple[Callable[[], object], str, int]] = {
    "v0": (lambda: {0: {FP32: _slots(buckets=False)}}, f"{OLD} .'0'.", 1),
    "v1a": (lambda: {0: {FP32: _slots(buckets=True)}}, f"{OLD} .'0'.", 1),
    "v1b": (
        lambda: {"bucket_sizes": [4], 0: {FP32: _slots(buckets=True)}},
        f"{OLD} .'0', 'bucket_sizes'.",
        1,
    ),
    "v1c": (
        lambda: {
            "per_bucket_numel": [{(BF16, FP32): [4]}],
            "per_bucket_numel_unpadded": [{(BF16, FP32): [4]}],
            0: {(BF16, FP32): _slots(buckets=True)},
        },
        f"{OLD} .'0', 'per_bucket_numel', 'per_bucket_numel_unpadded'.",
        1,
    ),
    "not_coalesced": (
        lambda: {**_current(), "buckets_coalesced": False},
        f"{OLD} .'0', 'buckets_coalesced'.",
        1,
    ),
    "nothing": (lambda: None, f"{OLD} .*NoneType.*", 1),
    "chained": (
        lambda: [_current(), None],
        "one optimizer must be there, got a list of 2 .chained optimizers are not supported.",
        1,
    ),
    "no_buffer": (lambda: {"buckets_coalesced": True}, f"{NUMBERED} ..", 3),
    "second_buffer": (
        lambda: {"buckets_coalesced": True, 1: _current()[0]},
        f"{NUMBERED} .1.",
        3,
    ),
    "text_key": (
        lambda: {"buckets_coalesced": True, 0: {"float32": {}}},
        "buffer 0: the key must be .param dtype, grad dtype., got 'float32'",
        3,
    ),
    "longer_than_said": (
        lambda: _current(numel_unpadded=3),
        "buffer 0: param must be a flat tensor of numel_unpadded = 3, got .4,.",
        3,
    ),
    "no_size": (
        lambda: _current(numel_unpadded=None),
        "buffer 0: numel_unpadded must be a size, got None",
        3,
    ),
    "slot_of_text": (
        lambda: _current(exp_avg="x"),
        "buffer 0: exp_avg must be a flat tensor of numel_unpadded = 4, got str",
        3,
    ),
    "one_storage": (
        _one_storage,
        "(exp_avg|exp_avg_sq) must have elements of its own, got some of (exp_avg|exp_avg_sq)'s",
        3,
    ),
}
"""By name: the tree of ``distrib_optim.pt``, the rule that refuses it, the exit code of verify."""


def files() -> Iterator[tuple[str, bytes]]:
    """Yield every file of ``fixtures/hostile/megatron`` with its bytes."""
    for name, (tree, _, _) in OPTIMIZER_FILES.items():
        yield f"distrib_optim_{name}.pt", torch_bytes(tree(), "distrib_optim")
    system = new_global("os", "system")
    for name, args in (
        ("is_call", Inert(system, (f"touch {CANARY}",))),
        (
            "has_call",
            Inert(
                new_global("argparse", "Namespace"),
                state={**TINY_ARGS, "save": Inert(system, (f"touch {CANARY}",))},
            ),
        ),
    ):
        tree = {"args": args, "checkpoint_version": 3.0, "iteration": 3, "model": tiny_model()}
        yield f"model_args_{name}.pt", torch_bytes(tree, "model_optim_rng")


def readme() -> str:
    """Return the table of the committed files."""
    lines = [
        "# Megatron files that must be refused",
        "",
        "Written by `python tests/megatron_hostile.py`. The `distrib_optim_*` files stand for an",
        "optimizer file of another version or with a fault, the `model_*` files for a",
        "`model_optim_rng.pt` whose pickle calls a program: the call is never made.",
        "",
        "| file | bytes |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| `{n}` | {len(d)} |" for n, d in files()), ""])


def write() -> None:
    """Write the committed files again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, data in files():
        (FOLDER / name).write_bytes(data)
    (FOLDER / "README.md").write_text(readme())


if __name__ == "__main__":
    write()

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
    """Return flat tensors of four elements: whole, or as a list of one a bucket."""
    flats = [flat_tensor(np.arange(i, i + 4)) for i in range(3)]
    return {name: [flat] if buckets else flat for name, flat in zip(SLOTS[1:], flats, strict=True)}


def _current(**changes: object) -> dict[object, object]:
    """Return the current version's tree with four elements a slot."""
    return {"buckets_coalesced": True, 0: {(BF16, FP32): {**_inner(), **changes}}}


def _inner() -> dict[str, object]:
    return {**_slots(buckets=False), "numel_unpadded": 4}


def _one_storage() -> dict[object, object]:
    flat = flat_tensor(np.arange(4))
    return _current(exp_avg=flat, exp_avg_sq=flat)


KNOWN = "{optimizer}: must be of a known version, got keys"
NUMBERED = "{optimizer}: buffers must be numbered from 0, got"
BUFFER = "{optimizer}: buffer 0: "
NO_LAYOUT = "layout: exactly one must agree with the files, got none: .*{optimizer}: bucket sizes "
MOMENTS = "(exp_avg|exp_avg_sq)"
OPTIMIZER_FILES: dict[str, tuple[Callable[[], object], str, int]] = {
    # Files of older versions, whose buffers are not this model's.
    "v0": (
        lambda: {0: {FP32: _slots(buckets=False)}},
        f"{NO_LAYOUT}must be [0-9]+ by the buffer formula, got 4.*",
        3,
    ),
    "v1a": (
        lambda: {0: {FP32: _slots(buckets=True)}},
        f"{NO_LAYOUT}must be [0-9]+ by the buffer formula, got 4.*",
        3,
    ),
    "v1b": (
        lambda: {"bucket_sizes": [4], 0: {FP32: _slots(buckets=True)}},
        f"{NO_LAYOUT}must be [0-9]+ by the buffer formula, got 4.*",
        3,
    ),
    "v1c": (
        lambda: {
            "per_bucket_numel": [{(BF16, FP32): [4]}],
            "per_bucket_numel_unpadded": [{(BF16, FP32): [4]}],
            0: {(BF16, FP32): _slots(buckets=True)},
        },
        f"{NO_LAYOUT}must be [0-9]+ by the buffer formula, got 4.*",
        3,
    ),
    "v1_of_another_dtype": (
        lambda: {"per_bucket_numel": [], 0: {(FP32, FP32): _slots(buckets=True)}},
        "layout: .*{optimizer}: buffers must be of .'bfloat16'. in this order, .*'float32'.*",
        3,
    ),
    "v1_half_in_lists": (
        lambda: {0: {FP32: {**_slots(buckets=True), "exp_avg": flat_tensor(np.arange(4))}}},
        BUFFER + "tensors must all be lists by bucket or none, got .'param', 'exp_avg', "
        "'exp_avg_sq'.",
        3,
    ),
    "v1_pieces_of_other_sizes": (
        lambda: {0: {FP32: {**_slots(buckets=True), "exp_avg": [flat_tensor(np.arange(3))]}}},
        BUFFER + "exp_avg must have pieces of .4,. elements as 'param' has, got .3,.",
        3,
    ),
    "v1_of_three_dtypes": (
        lambda: {0: {(BF16, FP32, FP32): _slots(buckets=True)}},
        BUFFER + "the key must be a dtype or a pair of them, got .*",
        3,
    ),
    # What is of no version.
    "newer": (lambda: {**_current(), "buckets_renamed": True}, KNOWN + " .'buckets_.*'.", 1),
    "not_coalesced": (
        lambda: {**_current(), "buckets_coalesced": False},
        f"{KNOWN} .'buckets_coalesced'.",
        1,
    ),
    "nothing": (lambda: None, "{optimizer}: must be a dict of buffers, got NoneType", 3),
    # Chained optimizers.
    "chained": (
        lambda: [_current(), None],
        "{optimizer}: every optimizer must be saved here, got an empty one .expert .*",
        1,
    ),
    "chained_none": (
        list,
        "{model}: must have as many optimizers as its optimizer file, got 1 and 0",
        3,
    ),
    "chained_twice": (
        lambda: [_current(), _current()],
        "{model}: must have as many optimizers as its optimizer file, got 1 and 2",
        3,
    ),
    "chained_fault": (
        lambda: [_current(), "x"],
        "{optimizer}: optimizer 1: must be a dict of buffers, got str",
        3,
    ),
    # The current version with a fault.
    "no_buffer": (lambda: {"buckets_coalesced": True}, f"{NUMBERED} ..", 3),
    "second_buffer": (
        lambda: {"buckets_coalesced": True, 1: _current()[0]},
        f"{NUMBERED} .1.",
        3,
    ),
    "text_key": (
        lambda: {"buckets_coalesced": True, 0: {"float32": _inner()}},
        BUFFER + "the key must be .param dtype, grad dtype., got 'float32'",
        3,
    ),
    "two_keys": (
        lambda: {"buckets_coalesced": True, 0: {(BF16, FP32): _inner(), (FP32, FP32): _inner()}},
        BUFFER + "must have one dtype key, got .*",
        3,
    ),
    "longer_than_said": (
        lambda: _current(numel_unpadded=3),
        BUFFER + "param must be a flat tensor of numel_unpadded = 3, got .4,.",
        3,
    ),
    "no_size": (
        lambda: _current(numel_unpadded=None),
        BUFFER + "numel_unpadded must be a size, got None",
        3,
    ),
    "no_master": (
        lambda: {
            "buckets_coalesced": True,
            0: {(BF16, FP32): {k: v for k, v in _inner().items() if k != "param"}},
        },
        BUFFER + "must have a tensor 'param', got .'exp_avg', 'exp_avg_sq'.",
        3,
    ),
    "slot_of_text": (
        lambda: _current(exp_avg="x"),
        BUFFER + "exp_avg must be a flat tensor, got str",
        3,
    ),
    "one_storage": (
        _one_storage,
        f"{{optimizer}}: {MOMENTS} must have elements of its own, got some of {MOMENTS}'s",
        3,
    ),
}
"""By name: the tree of ``distrib_optim.pt``, the line that refuses it, the exit code of verify.

In the line, a pattern, ``{optimizer}`` and ``{model}`` stand for the paths of the two files.
"""


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
        "optimizer file of no known version, of another model or with a fault, the `model_*`",
        "files for a `model_optim_rng.pt` whose pickle calls a program: the call is never made.",
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

"""What torch can be asked to save, and the files that some torch has saved."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ckpttools.dtypes import BY_NAME

REAL = sorted((Path(__file__).parents[2] / "fixtures" / "megatron").glob("*/torch/**/*.pt"))
OLD = sorted(Path(__file__).parent.glob("torch-*.pt"))

x = torch.arange(35, dtype=torch.float32).reshape(5, 7)
CASES: dict[str, Callable[[], Any]] = {
    "dense": lambda: {"a": x, "b": x + 100},
    "views_share_a_storage": lambda: [x, x[1:3], x[:, 2:5], x.t(), x[2], x[3, 4], x[::2, ::3]],
    "zero_dim": lambda: torch.tensor(2.5, dtype=torch.float64),
    "empty": lambda: [torch.ones(0), torch.ones(3, 0, 2), x[5:], x],
    "expanded": lambda: torch.arange(3, dtype=torch.int16).expand(4, 3),
    "parameters": lambda: OrderedDict(w=torch.nn.Parameter(x), f=torch.nn.Parameter(x, False)),
    "grad": lambda: x.clone().requires_grad_(),
    "module": lambda: torch.nn.Linear(3, 5).state_dict(),
    "optimizer": lambda: torch.optim.AdamW([torch.nn.Parameter(x)], lr=0.1).state_dict(),
    "shared_twice": lambda: {"a": x, "b": [x, x.view(-1)]},
    "untyped": lambda: [x.untyped_storage().clone(), x],
    "thousand": lambda: [torch.full((1,), i, dtype=torch.int32) for i in range(1100)],
    **{
        f"dtype_{name}": lambda name=name: torch.tensor([1, 0]).to(getattr(torch, name))
        for name in BY_NAME
    },
}

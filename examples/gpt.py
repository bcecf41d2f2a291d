"""What does the training example train? A small GPT over bytes, about a million parameters.

Pre-norm blocks of causal attention and a GELU feed-forward of four times the width, learned
positions, and one table for the embedding and the output layer (tied: one parameter). No dropout,
and all weights are drawn from a generator of their own, so the model is a pure function of its
shape and a seed: every rank builds the same one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256
INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; the default one has 1,032,576 parameters."""

    layers: int = 5
    width: int = 128
    heads: int = 4
    context: int = 64


class Attention(nn.Module):
    """Let each byte look at those before it: [batch, length, width] to the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        merged: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return merged


class Block(nn.Module):
    """Attention, then the feed-forward; each adds to what it was given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """Predict the next byte: int64 [batch, length] to logits [batch, length, 256]."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self._draw(torch.Generator().manual_seed(seed))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats a byte, taken in fp32."""
        logits = self(tokens).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _draw(self, generator: torch.Generator) -> None:
        """Set every parameter: normal matrices, narrower where a branch ends; zero biases."""
        narrow = INIT_STD / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                branch_end = name.endswith(("attention.out.weight", "down.weight"))
                parameter.normal_(0, narrow if branch_end else INIT_STD, generator=generator)
            else:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)

"""A small GPT over bytes or tokens, as a list of layers.

A pipeline cuts a model between layers, so the model is a list and not one module: embedding, blocks, head. Blocks are
pre-LayerNorm (Radford et al., GPT-2, 2019): the residual path runs unchanged from the embedding to the head.

No Linear has a bias. A key bias shifts all attention scores of a query alike, so softmax cancels it and its true
gradient is zero; an adaptive optimizer would scale that rounding noise up to whole steps, which then differ from layout
to layout. The biases of the LayerNorms before them do the work of the others.

Weights start with a standard deviation of 1/sqrt(width), those that write to the residual path divided by
sqrt(2 * blocks), as in GPT-2. GPT-2's own 0.02 is right for its width of 768 to 1600; a model of width 64 then needs
100 steps more before it learns anything but the frequencies of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional


def layer_factories(
    num_blocks: int, width: int, num_heads: int, context: int, dropout: float, vocab_size: int
) -> list[Callable[[], nn.Module]]:
    """Factories of the num_blocks + 2 layers: int64 (batch, time) -> (batch, time, width) -> (batch, time, vocab)."""
    block = partial(Block, width, num_heads, dropout, residual_scale=1 / math.sqrt(2 * num_blocks))
    return [
        partial(Embedding, vocab_size, width, context, dropout),
        *[block] * num_blocks,
        partial(Head, width, vocab_size),
    ]


class Embedding(nn.Module):
    """Token plus learned position: int64 (batch, time <= context) -> (batch, time, width)."""

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float):
        super().__init__()
        self.token = _normal(nn.Embedding(vocab_size, width), width)
        self.position = _normal(nn.Embedding(context, width), width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(places))


class Block(nn.Module):
    """One transformer block, (batch, time, width) -> the same: causal attention, then a perceptron of 4 x width."""

    def __init__(self, width: int, num_heads: int, dropout: float, residual_scale: float):
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = _normal(nn.Linear(width, 3 * width, bias=False), width)
        self.attention_out = _normal(nn.Linear(width, width, bias=False), width, residual_scale)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = _normal(nn.Linear(width, 4 * width, bias=False), width)
        self.mlp_out = _normal(nn.Linear(4 * width, width, bias=False), width, residual_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._drop(self.attention_out(self._attend(self.attention_norm(x))))
        return x + self._drop(self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)))))

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        return mixed.transpose(1, 2).reshape(batch, time, width)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout, self.training)


class Head(nn.Module):
    """LayerNorm and the scores of the next token: (batch, time, width) -> (batch, time, vocab_size)."""

    def __init__(self, width: int, vocab_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = _normal(nn.Linear(width, vocab_size, bias=False), width)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(self.norm(x))


def _normal(module: nn.Linear | nn.Embedding, width: int, scale: float = 1.0) -> nn.Linear | nn.Embedding:
    nn.init.normal_(module.weight, std=scale / math.sqrt(width))
    return module


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum in nats over all positions, a scalar: outputs (batch, time, vocab_size), targets int64 (batch, time)."""
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")


@torch.no_grad()
def continue_tokens(
    forward: Callable[[Tensor], Tensor], prompt: Sequence[int], num_tokens: int, context: int, temperature: float
) -> list[int]:
    """The prompt and num_tokens more, each drawn from softmax(scores / temperature) under a generator of its own.

    Fewer where a score is not finite: a model that has learnt nothing is no error.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.tensor(prompt, dtype=torch.int64)
    for _ in range(num_tokens):
        scores = forward(tokens[-context:].unsqueeze(0))[0, -1].double().cpu()
        if not torch.isfinite(scores).all():
            break
        drawn = torch.multinomial(torch.softmax(scores / temperature, dim=0), 1, generator=generator)
        tokens = torch.cat([tokens, drawn])
    return tokens.tolist()

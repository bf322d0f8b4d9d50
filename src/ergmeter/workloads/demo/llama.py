"""What does the demo train? A small language model of the Llama kind, in plain torch.

The trap: a toy that costs nothing like the real thing, so that its figures teach nothing. This one
has the parts whose cost matters: pre-norm with RMSNorm, rotary positions, grouped-query attention
through the fused kernel, a SwiGLU, and an output head tied to the embedding. What large models add
(caches, parallelism, dropout) is left out.

Touvron et al. 2023 (arXiv 2302.13971) for the block; Su et al. 2021 (2104.09864) for the rotation;
Ainslie et al. 2023 (2305.13245) for the grouped heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812  as everybody calls it
from torch import Tensor, nn

_INITIAL_STD = 0.02


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The shape of a model."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int  # heads / kv_heads queries share one key and one value
    hidden: int  # of the SwiGLU
    context: int  # the longest input, in tokens
    rotary_base: float = 10_000.0

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.heads

    @property
    def described(self) -> dict[str, object]:
        """The same as a config.json has it, to count FLOPs from."""
        return {
            "model_type": "llama",
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.hidden,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
        }

    @property
    def parameters(self) -> int:
        """How many parameters the model has; the tied head is the embedding, counted once."""
        attention = 2 * self.width**2 + 2 * self.width * self.kv_heads * self.head_width
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.vocabulary * self.width + self.layers * layer + self.width


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of one, times a learned weight."""

    def __init__(self, width: int, *, epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; in float32, as a bf16 mean of squares is too coarse."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale).type_as(x) * self.weight


def rotation(length: int, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (length, head_width / 2)."""
    rates = base ** (-torch.arange(0, head_width, 2).float() / head_width)
    angles = torch.outer(torch.arange(length).float(), rates)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + half]) of the last dimension by its position's angle.

    Turning both q and k makes their product depend on how far apart they are, not on where.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(turned, dim=-1).type_as(x)


class SelfAttention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.group = config.heads // config.kv_heads
        kv_width = config.kv_heads * config.head_width
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix each position with those before it."""
        q, k, v = (self._heads(project(x)) for project in (self.q, self.k, self.v))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        # The kernel can share heads by itself (enable_gqa), but only from torch 2.5 on, and not on
        # every device; repeating is the same sum.
        k, v = (kv.repeat_interleave(self.group, dim=1) for kv in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, heads, length, head_width)."""
        return x.view(*x.shape[:2], -1, self.head_width).transpose(1, 2)


class SwiGLU(nn.Module):
    """The feed-forward part: a gated pair of projections and one back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class LlamaLayer(nn.Module):
    """Attention, then feed-forward, each normalised before and added to what came in."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width)
        self.attention = SelfAttention(config)
        self.forward_norm = RMSNorm(config.width)
        self.feed_forward = SwiGLU(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.forward_norm(x))
        return out


class Llama(nn.Module):
    """Tokens in, logits of the next token out."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width)
        cos, sin = rotation(config.context, config.head_width, config.rotary_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=_INITIAL_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) to (batch, length, vocabulary)."""
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embedding.weight)

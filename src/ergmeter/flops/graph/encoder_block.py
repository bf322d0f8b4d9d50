"""The layer that every encoder is made of, a tower's and a translator's too.

The trap: the order of norms. BERT has its norms after each part and most others before, and with
frozen embeddings that decides whether the first projections are walked back through. So a layer is
built in its own order, not in one that has the same parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.graph.decoder import add_mlp
from ergmeter.flops.graph.layers import Mlp, SelfAttention
from ergmeter.flops.graph.mixing import add_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.graph import Builder, Node


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """A layer of an encoder, or of the decoder that reads from one."""

    attention: SelfAttention
    feed: Mlp
    norm: int  # parameters of the norm at the attention
    feed_norm: int  # and of that at the feed-forward
    cross: SelfAttention | None = None  # attention to the source; its norm is as large as `norm`
    is_post_norm: bool = False  # normed after the sum and not before the part
    extra_params: int = 0  # such as a scale for each channel


def add_block(
    b: Builder,
    block: EncoderBlock,
    x: str,
    *,
    name: str,
    hidden: int,
    stream: str,
    memory: str | None = None,
) -> str:
    """Append a layer; `memory` is what cross attention reads."""
    node = _Sums(b, name=name, stream=stream, is_post_norm=block.is_post_norm)

    def attention(source: str) -> str:
        return add_attention(
            b, block.attention, source, source, name=name, hidden=hidden, stream=stream
        )

    def feed(source: str) -> str:
        return add_mlp(b, block.feed, source, name=name, hidden=hidden, part="mlp", stream=stream)

    out = node.around("attention", x, block.norm + block.extra_params, attention)
    cross = block.cross
    if cross is not None and memory is not None:

        def across(source: str) -> str:
            return add_attention(
                b, cross, source, memory, name=name, hidden=hidden, stream=stream, keys="source"
            )

        out = node.around("cross", out, block.norm, across)
    return node.around("feed", out, block.feed_norm, feed)


@dataclass(frozen=True, slots=True)
class _Sums:
    """How a layer adds its parts to what goes through it."""

    b: Builder
    name: str
    stream: str
    is_post_norm: bool

    def around(self, what: str, x: str, params: int, part: Callable[[str], str]) -> str:
        if self.is_post_norm:
            return self._norm(what, (x, part(x)), params)
        made = part(self._norm(what, (x,), params))
        return self.b.add(
            f"{self.name}.{what}_out", "residual", (x, made), stream=self.stream, layer=self.name
        )

    def _norm(self, what: str, of: tuple[str, ...], params: int) -> str:
        return self.b.add(
            f"{self.name}.{what}_norm",
            "norm",
            of,
            params=params,
            stream=self.stream,
            layer=self.name,
        )


def renamed(nodes: Sequence[Node], what: str) -> tuple[Node, ...]:
    """The nodes, counted in rows of the table of their own: `encoder mlp`, `vision mlp`."""
    return tuple(replace(node, part=f"{what} {node.part}") for node in nodes)


def head_size(c: ModelConfig, hidden: int, heads: int) -> int:
    """Numbers of one head, where the hidden size is cut into as many."""
    if hidden % heads:
        raise FormatError(f"{c.where}: the hidden size {hidden} is no multiple of {heads} heads")
    return hidden // heads


def biased_attention(c: ModelConfig, hidden: int, heads: int, **more: object) -> SelfAttention:
    """Attention that looks both ways, with biases everywhere."""
    plain = SelfAttention(
        heads,
        heads,
        head_size(c, hidden, heads),
        q_bias=True,
        kv_bias=True,
        out_bias=True,
        mask="full",
    )
    return replace(plain, **more)  # type: ignore[arg-type]

"""Vision towers: what cuts an image into patches and looks at them.

The trap: a class token, a merge or a window, each of which makes the rows of one part of a tower
other than those of the next. So patches as they are cut, rows of the layers, rows in windows and
rows of the features that leave the tower are streams of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.config import ModelConfig, shown_value
from ergmeter.flops.graph.encoder_block import EncoderBlock, add_block
from ergmeter.flops.graph.graph import Attention, Builder
from ergmeter.flops.graph.layers import Mlp, SelfAttention

ImageSize = tuple[int, int]
"""Height and width in pixels."""

_ASSUMED_SIZE = (448, 448)  # for towers that take an image of any size, where none is said


@dataclass(frozen=True)
class Tower:
    """A vision transformer: patches, layers, and what is around them."""

    hidden: int
    blocks: tuple[EncoderBlock, ...]
    grid: tuple[int, int]  # patches down and across one view of an image
    patch_inputs: int  # numbers in a patch
    prefix: str
    patch_bias: bool = False
    class_tokens: int = 0
    tables: int = 0  # parameters of positions, and of the class token
    before_norm: int = 0
    after_norm: int = 0
    windowed: frozenset[int] = frozenset()  # layers that see a window only
    window_side: int = 0
    pool_size: int = 0  # of the feed-forward in a pooling head that no language model reads
    is_size_assumed: bool = False  # it takes an image of any size, and none was said
    layer_name: str = "encoder.layers"
    patch_name: str = "embeddings.patch_embedding"


def add_tower(b: Builder, t: Tower) -> tuple[list[str], str]:
    """Append a tower; returns what is after each layer, and its result."""
    name = t.prefix
    x = b.linear(
        f"{name}.{t.patch_name}",
        "patches",
        (),
        t.patch_inputs,
        t.hidden,
        bias=t.patch_bias,
        is_module=False,
        stream="patch grid",
    )
    taken: tuple[str, ...] = (x,)
    if t.tables:
        table = b.add(
            f"{name}.embeddings.tables",
            "embedding",
            params=t.tables,
            stream="patches",
            role="positions",
        )
        taken = (x, table)
    x = b.add(f"{name}.before_norm", "norm", taken, params=t.before_norm, stream="patches")
    states = [x]
    for number, block in enumerate(t.blocks):
        stream = "patch windows" if number in t.windowed else "patches"
        at = f"{name}.{t.layer_name}.{number}"
        x = add_block(b, block, x, name=at, hidden=t.hidden, stream=stream)
        states.append(x)
    x = b.add(f"{name}.after_norm", "norm", x, params=t.after_norm, stream="patches")
    if t.pool_size:
        _add_pool(b, t, x)
    return states, x


def _add_pool(b: Builder, t: Tower, x: str) -> None:
    """SigLIP's head: one learned query an image. It is computed, and leads nowhere."""
    at, part, hidden = f"{t.prefix}.head", "pool", t.hidden
    heads = t.blocks[0].attention.heads
    probe = b.add(f"{at}.probe", part, params=hidden, stream="images")
    query = b.linear(
        f"{at}.attention.q",
        part,
        probe,
        hidden,
        hidden,
        bias=True,
        is_module=False,
        stream="images",
    )
    both = b.linear(
        f"{at}.attention.kv",
        part,
        x,
        hidden,
        2 * hidden,
        bias=True,
        is_module=False,
        stream="patches",
    )
    core = b.add(
        f"{at}.attention.core",
        "attention",
        (query, both, both),
        work=Attention(heads, hidden // heads, hidden // heads, heads, "full", keys="patches"),
        stream="images",
    )
    out = b.linear(
        f"{at}.attention.out_proj", part, core, hidden, hidden, bias=True, stream="images"
    )
    normed = b.add(f"{at}.layernorm", "norm", out, params=2 * hidden, stream="images")
    inner = b.linear(f"{at}.mlp.fc1", part, normed, hidden, t.pool_size, bias=True, stream="images")
    b.linear(f"{at}.mlp.fc2", part, inner, t.pool_size, hidden, bias=True, stream="images")


def edge(c: ModelConfig, name: str) -> int:
    """The length of a square's edge, written as one number or as two."""
    value = c.raw(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise FormatError(f"{c.where}: {name} must be a square; got {shown_value(value)}")
        return ModelConfig({name: value[0]}, where=c.where).whole(name)
    return c.whole(name)


def _fixed_grid(c: ModelConfig) -> tuple[int, int]:
    side = edge(c, "image_size") // edge(c, "patch_size")
    if not side:
        raise FormatError(f"{c.where}: patch_size is larger than image_size")
    return side, side


def vit_block(c: ModelConfig, *, layer_norms: bool = True) -> EncoderBlock:
    """A layer of CLIP, and of the many towers after it."""
    hidden, heads = c.whole("hidden_size"), c.whole("num_attention_heads")
    if hidden % heads:
        raise FormatError(
            f"{c.where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        )
    attention = SelfAttention(
        heads,
        heads,
        hidden // heads,
        q_bias=True,
        kv_bias=True,
        out_bias=True,
        mask="full",
        names=("q_proj", "k_proj", "v_proj", "out_proj"),
    )
    feed = Mlp(c.whole("intermediate_size"), is_gated=False, bias=True, names=("fc1", "fc2"))
    norm = hidden * (2 if layer_norms else 1)
    return EncoderBlock(attention, feed, norm, norm)


def vit(c: ModelConfig, *, prefix: str) -> Tower:
    """A tower of such layers over an image of one size, with a learned position for each patch."""
    hidden = c.whole("hidden_size")
    rows, columns = _fixed_grid(c)
    return Tower(
        hidden,
        (vit_block(c),) * c.whole("num_hidden_layers"),
        (rows, columns),
        c.whole("num_channels", default=3) * edge(c, "patch_size") ** 2,
        prefix,
        patch_bias=True,
        tables=rows * columns * hidden,
        after_norm=2 * hidden,
    )


def _clip(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """CLIP: a class token, a norm before the layers; the one after them is for the class."""
    check_size(c, image_size)
    base = vit(c, prefix=prefix)
    return replace(
        base,
        patch_bias=False,
        class_tokens=1,
        tables=base.tables + 2 * base.hidden,
        before_norm=2 * base.hidden,
    )


def _siglip(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """SigLIP: no class token; a pooling head, which language models leave out or do not read."""
    check_size(c, image_size)
    has_pool = c.flag("vision_use_head", default=True)
    return replace(vit(c, prefix=prefix), pool_size=c.whole("intermediate_size") if has_pool else 0)


def pixtral(c: ModelConfig, *, prefix: str, image_size: ImageSize | None, merge: int = 1) -> Tower:
    """Pixtral: Llama's layers looking both ways, over an image of any size."""
    hidden, patch = c.whole("hidden_size"), edge(c, "patch_size")
    block = vit_block(c, layer_norms=False)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    plain = replace(block.attention, q_bias=False, kv_bias=False, out_bias=False, names=names)
    feed = Mlp(c.whole("intermediate_size"), module="feed_forward")
    size = image_size or _ASSUMED_SIZE
    rows, columns = (merge * -(-length // (patch * merge)) for length in size)
    return Tower(
        hidden,
        (replace(block, attention=replace(plain, module="attention"), feed=feed),)
        * c.whole("num_hidden_layers"),
        (rows, columns),
        c.whole("num_channels", default=3) * patch * patch,
        prefix,
        before_norm=hidden,
        is_size_assumed=image_size is None,
        layer_name="transformer.layers",
        patch_name="patch_conv",
    )


def check_size(c: ModelConfig, image_size: ImageSize | None) -> None:
    """A tower of one size resizes what it is given: the size asked for must be that."""
    side = edge(c, "image_size")
    if image_size is not None and image_size != (side, side):
        raise UsageError(
            f"{c.where}: every image is resized to {side} x {side}; leave the image size out"
        )


TOWERS = {"clip_vision_model": _clip, "siglip_vision_model": _siglip, "pixtral": pixtral}


def tower_of(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """The tower that a `vision_config` says it is."""
    if c.model_type not in TOWERS:
        raise FormatError(
            f"{c.where}: the vision tower {c.model_type!r} is not known;"
            f" there are {', '.join(TOWERS)}"
        )
    return TOWERS[c.model_type](c, prefix=prefix, image_size=image_size)


def pixels(tower: Tower, c: ModelConfig) -> ImageSize:
    """How large an image is when its patches are cut."""
    patch = edge(c, "patch_size")
    return tower.grid[0] * patch, tower.grid[1] * patch


def _qwen_grid(v: ModelConfig, image_size: ImageSize | None) -> tuple[int, int]:
    """Patches of an image that is resized to whole tokens, as the Qwen processors do."""
    high, wide = image_size or _ASSUMED_SIZE
    merge = v.whole("spatial_merge_size")
    factor = v.whole("patch_size") * merge
    return max(1, round(high / factor)) * merge, max(1, round(wide / factor)) * merge


def qwen_tower(
    v: ModelConfig, hidden: int, feed: Mlp, norm: int, image_size: ImageSize | None
) -> Tower:
    """A tower of the Qwen VL models: fused projections, and patches two frames deep."""
    heads = v.whole("num_heads")
    if hidden % heads:
        raise FormatError(f"{v.where}: {hidden} is no multiple of num_heads {heads}")
    attention = SelfAttention(
        heads,
        heads,
        hidden // heads,
        q_bias=True,
        out_bias=True,
        mask="full",
        fused="qkv",
        names=("", "", "", "proj"),
        module="attn",
    )
    channels = v.whole("in_channels", "in_chans", default=3)
    return Tower(
        hidden,
        (EncoderBlock(attention, feed, norm, norm),) * v.whole("depth"),
        _qwen_grid(v, image_size),
        channels * v.whole("temporal_patch_size") * v.whole("patch_size") ** 2,
        "model.visual",
        is_size_assumed=image_size is None,
        layer_name="blocks",
        patch_name="patch_embed.proj",
    )

"""Vision towers, and the graph of a language model with a tower and projectors.

A class token, a merge or a window changes the number of rows from one part of a tower to the next.
So cut patches, rows of the layers, rows in windows and features are separate streams.

A tower works on patches, four or sixteen of them to a token, and has its own cost. The tokens that
an image becomes are already in the text's length. A frozen tower costs its forward pass alone,
while the projector above it gets gradients through the decoder. This follows from the tower feeding
the decoder's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.config import ModelConfig, quoted_value
from ergmeter.flops.families import DECODERS
from ergmeter.flops.families.decoders import QWEN2, QWEN3, QWEN3_MOE
from ergmeter.flops.graph.decoder import (
    EncoderBlock,
    add_block,
    add_decoder,
    biased_attention,
    decoder_graph,
    renamed,
)
from ergmeter.flops.graph.graph import Attention, Builder, Graph
from ergmeter.flops.graph.layers import Decoder, Mlp, Piece, add_piece

if TYPE_CHECKING:
    from collections.abc import Callable


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
    name, grid = t.prefix, Builder(b.nodes, stream="patch grid")
    b = Builder(b.nodes, stream="patches")
    at, inputs = f"{name}.{t.patch_name}", t.patch_inputs
    x = grid.linear(at, "patches", (), inputs, t.hidden, bias=t.patch_bias, is_module=False)
    taken: tuple[str, ...] = (x,)
    if t.tables:
        table = b.add(f"{name}.embeddings.tables", "embedding", params=t.tables, role="positions")
        taken = (x, table)
    x = b.add(f"{name}.before_norm", "norm", taken, params=t.before_norm)
    states = [x]
    for number, block in enumerate(t.blocks):
        stream = "patch windows" if number in t.windowed else "patches"
        x = add_block(b.within(f"{name}.{t.layer_name}.{number}", stream), block, x, t.hidden)
        states.append(x)
    x = b.add(f"{name}.after_norm", "norm", x, params=t.after_norm)
    if t.pool_size:
        _add_pool(b, t, x)
    return states, x


def _add_pool(b: Builder, t: Tower, patches: str) -> None:
    """SigLIP's head: one learned query an image. It is computed, and leads nowhere."""
    at, part, hidden = f"{t.prefix}.head", "pool", t.hidden
    heads = t.blocks[0].attention.heads
    images = Builder(b.nodes, stream="images")
    x = images.add(f"{at}.probe", part, params=hidden)
    x = images.linear(f"{at}.attention.q", part, x, hidden, hidden, bias=True, is_module=False)
    name = f"{at}.attention.kv"
    both = b.linear(name, part, patches, hidden, 2 * hidden, bias=True, is_module=False)
    work = Attention(heads, hidden // heads, hidden // heads, heads, "full", keys="patches")
    x = images.add(f"{at}.attention.core", "attention", (x, both, both), work=work)
    x = images.linear(f"{at}.attention.out_proj", part, x, hidden, hidden, bias=True)
    x = images.add(f"{at}.layernorm", "norm", x, params=2 * hidden)
    x = images.linear(f"{at}.mlp.fc1", part, x, hidden, t.pool_size, bias=True)
    images.linear(f"{at}.mlp.fc2", part, x, t.pool_size, hidden, bias=True)


def edge(c: ModelConfig, name: str) -> int:
    """The length of a square's edge, written as one number or as two."""
    value = c.raw(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise FormatError(f"{c.where}: {name} must be a square; got {quoted_value(value)}")
        return ModelConfig({name: value[0]}, where=c.where).integer(name)
    return c.integer(name)


def _fixed_grid(c: ModelConfig) -> tuple[int, int]:
    side = edge(c, "image_size") // edge(c, "patch_size")
    if not side:
        raise FormatError(f"{c.where}: patch_size is larger than image_size")
    return side, side


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def vit_block(c: ModelConfig, *, layer_norms: bool = True) -> EncoderBlock:
    """A layer of CLIP, and of the many towers after it."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    attention = biased_attention(c, hidden, heads, names=PROJECTIONS)
    feed = Mlp(c.integer("intermediate_size"), is_gated=False, bias=True, names=("fc1", "fc2"))
    norm = hidden * (2 if layer_norms else 1)
    return EncoderBlock(attention, feed, norm, norm)


def vit(c: ModelConfig, *, prefix: str) -> Tower:
    """A tower of such layers over an image of one size, with a learned position for each patch."""
    hidden = c.integer("hidden_size")
    rows, columns = _fixed_grid(c)
    blocks = (vit_block(c),) * c.integer("num_hidden_layers")
    inputs = c.integer("num_channels", default=3) * edge(c, "patch_size") ** 2
    base = Tower(hidden, blocks, (rows, columns), inputs, prefix, patch_bias=True)
    return replace(base, tables=rows * columns * hidden, after_norm=2 * hidden)


def _clip(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """CLIP: a class token, a norm before the layers; the one after them is for the class."""
    check_size(c, image_size)
    base = vit(c, prefix=prefix)
    norm, tables = 2 * base.hidden, base.tables + 2 * base.hidden
    return replace(base, patch_bias=False, class_tokens=1, tables=tables, before_norm=norm)


def _siglip(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """SigLIP: no class token; a pooling head, which language models leave out or do not read."""
    check_size(c, image_size)
    if not c.flag("vision_use_head", default=True):
        return vit(c, prefix=prefix)
    return replace(vit(c, prefix=prefix), pool_size=c.integer("intermediate_size"))


def pixtral(c: ModelConfig, *, prefix: str, image_size: ImageSize | None, merge: int = 1) -> Tower:
    """Pixtral: Llama's layers looking both ways, over an image of any size."""
    hidden, patch = c.integer("hidden_size"), edge(c, "patch_size")
    block = vit_block(c, layer_norms=False)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    plain = replace(block.attention, q_bias=False, kv_bias=False, out_bias=False, names=names)
    feed = Mlp(c.integer("intermediate_size"), module="feed_forward")
    size = image_size or _ASSUMED_SIZE
    rows, columns = (merge * -(-length // (patch * merge)) for length in size)
    block = replace(block, attention=replace(plain, module="attention"), feed=feed)
    blocks = (block,) * c.integer("num_hidden_layers")
    inputs = c.integer("num_channels", default=3) * patch * patch
    base = Tower(hidden, blocks, (rows, columns), inputs, prefix, before_norm=hidden)
    base = replace(base, layer_name="transformer.layers", patch_name="patch_conv")
    return replace(base, is_size_assumed=image_size is None)


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
    """The size of an image when its patches are cut."""
    patch = edge(c, "patch_size")
    return tower.grid[0] * patch, tower.grid[1] * patch


def _qwen_grid(v: ModelConfig, image_size: ImageSize | None) -> tuple[int, int]:
    """Patches of an image that is resized to whole tokens, as the Qwen processors do."""
    high, wide = image_size or _ASSUMED_SIZE
    merge = v.integer("spatial_merge_size")
    factor = v.integer("patch_size") * merge
    return max(1, round(high / factor)) * merge, max(1, round(wide / factor)) * merge


def qwen_tower(
    v: ModelConfig, hidden: int, feed: Mlp, norm: int, image_size: ImageSize | None
) -> Tower:
    """A tower of the Qwen VL models: fused projections, and patches two frames deep."""
    names, module = ("", "", "", "proj"), "attn"
    attention = biased_attention(
        v, hidden, v.integer("num_heads"), kv_bias=False, fused="qkv", names=names, module=module
    )
    channels = v.integer("in_channels", "in_chans", default=3)
    blocks = (EncoderBlock(attention, feed, norm, norm),) * v.integer("depth")
    grid = _qwen_grid(v, image_size)
    inputs = channels * v.integer("temporal_patch_size") * v.integer("patch_size") ** 2
    base = Tower(hidden, blocks, grid, inputs, "model.visual", layer_name="blocks")
    return replace(base, patch_name="patch_embed.proj", is_size_assumed=image_size is None)


# A language model with a tower and projectors.


@dataclass(frozen=True, slots=True)
class Projector:
    """From the tower to the decoder: after which of its layers, and through what."""

    steps: tuple[Piece, ...]
    states: tuple[int, ...] = ()  # as transformers counts hidden states; none: the tower's result


@dataclass(frozen=True)
class VisionLanguageModel:
    """A vision-language model."""

    family: str
    tower: Tower
    projectors: tuple[Projector, ...]
    text: Decoder
    features: int  # rows of the projector for one view
    image_size: ImageSize
    views: int = 1  # an image is seen as so many
    tokens: int | None = None  # of the sequence that an image takes, where it is not `features`
    extra_params: int = 0
    assumptions: tuple[str, ...] = ()


def vision_language_graph(m: VisionLanguageModel) -> Graph:
    """The graph of a vision-language model."""
    b = Builder()
    states, result = add_tower(b, m.tower)
    b.nodes[:] = renamed(b.nodes, "vision")
    features = tuple(_add_projector(b, each, states, result) for each in m.projectors)
    if m.extra_params:
        features = (*features, b.add("model.image_newline", "embedding", params=m.extra_params))
    add_decoder(b, m.text, inputs=features)
    tokens = m.tokens or m.features
    high, wide = m.image_size
    facts = {**image_facts(m.tower), "features_per_view": m.features}
    facts |= {"views_per_image": m.views, "tokens_per_image": tokens}
    if m.tower.window_side:
        facts["window_side"] = m.tower.window_side
    unsaid = "no image size was given: " if m.tower.is_size_assumed else ""
    assumptions = (
        f"{unsaid}an image is {high} x {wide} pixels,"
        f" {m.views * facts['patches_per_view']} patches to the tower,"
        f" and {tokens} tokens that the sequence length includes",
        "image tokens attend as text does, each to those before it",
        *m.assumptions,
        *m.text.assumptions,
    )
    text, nodes = m.text, tuple(b.nodes)
    return Graph(m.family, nodes, text.hidden, len(text.layers), text.vocab, assumptions, facts)


def image_facts(tower: Tower) -> dict[str, int]:
    """The facts of an image that a batch needs."""
    rows, columns = tower.grid
    return {
        "grid_rows": rows,
        "grid_columns": columns,
        "patches_per_view": rows * columns + tower.class_tokens,
        "features_per_view": rows * columns,
        "views_per_image": 1,
        "tokens_per_image": 0,  # they are no part of a text
    }


def _add_projector(b: Builder, projector: Projector, states: list[str], result: str) -> str:
    b = Builder(b.nodes, stream="features")
    taken = tuple(states[number] for number in projector.states) or (result,)
    for step in projector.steps:
        if step.norm:
            taken = (b.add(f"{step.name}.norm", "norm", taken, params=step.norm),)
        taken = (add_piece(b, step, taken, "projector"),)
    return taken[0]


# The language model of a configuration.

TEXTS: dict[str, Callable[[ModelConfig], Decoder]] = {
    **DECODERS,
    "qwen2_vl_text": QWEN2,
    "qwen2_5_vl_text": QWEN2,
    "qwen3_vl_text": QWEN3,
    "qwen3_vl_moe_text": QWEN3_MOE,
}


def text_of(c: ModelConfig, *, kind: str, prefix: str = "model.language_model") -> Decoder:
    """The language model; `kind` is its family where the configuration does not say."""
    is_flat = c.model_type in _FLAT and "text_config" not in c.fields
    part = c.as_family(kind) if is_flat else c.part("text_config", kind=kind)
    if part.model_type not in TEXTS:
        raise FormatError(f"{part.where}: the architecture {part.model_type!r} is not known")
    text = TEXTS[part.model_type](part)
    is_tied = text.is_tied
    if c.model_type not in _TIED_BY_TEXT or "tie_word_embeddings" in c.fields:
        is_tied = c.flag("tie_word_embeddings", default=is_tied) or (
            is_tied and c.model_type in _TIED_BY_EITHER
        )
    return replace(text, prefix=prefix, is_tied=is_tied)


# Models whose towers can't be read, and the family of their language model where it is not said.
LANGUAGE_ALONE = {
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "phi4_multimodal": "phi3",
    "llava_onevision": "qwen2",
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "lfm2_vl": "lfm2",
    "kimi_k25": "deepseek_v3",
    "idefics2": "mistral",
    "qwen2_audio": "qwen2",
}


def language_alone(c: ModelConfig) -> Graph:
    """The graph of the language model in a model whose towers can't be read."""
    text = text_of(c, kind=LANGUAGE_ALONE[c.model_type])
    line = (
        f"only the language model of {c.model_type} is counted, and these are its parameters: the"
        " towers for images and audio can't be read; what they make of them is in the sequence"
    )
    return decoder_graph(replace(text, assumptions=(line, *text.assumptions)))


# Whether the head is tied is the outer field's to say, but for what older versions wrote.
_TIED_BY_EITHER = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
# Mistral Small's weights are not tied and its files have no outer field, whose default would be.
_TIED_BY_TEXT = ("mistral3",)
# They have its fields beside `vision_config`, not in a part of their own.
_FLAT = ("qwen2_vl", "qwen2_5_vl", "phi4_multimodal")

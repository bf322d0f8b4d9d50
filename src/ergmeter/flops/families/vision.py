"""Readers and graphs of models that see images: vision-language, image and image-text models.

A vision-language model is a vision tower (an image encoder), a projector and a decoder. In an image
model (ViT) a sequence is one image, and its length is the number of patches. An image-text model
(CLIP, SigLIP) has one tower for images and one for texts; each row is counted in its own tower.

A class token, a merge or a window changes the number of rows from one part of a tower to the next.
So cut patches, rows of the layers, rows in windows and features are separate streams.

A tower computes every patch; a projector then merges patches into tokens, such as 4 into 1. The
decoder's sequence length already includes these tokens. A frozen tower costs its forward pass only.
A trained projector above it still gets its gradients through the decoder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.config import ModelConfig, head_of, quoted_value
from ergmeter.flops.families import DECODERS
from ergmeter.flops.families.decoders import QWEN2, QWEN3, QWEN3_MOE
from ergmeter.flops.families.pieces import biased_attention
from ergmeter.flops.graph.graph import Attention, Builder, Graph, Mask
from ergmeter.flops.graph.heads import labels_of
from ergmeter.flops.graph.layers import (
    Decoder,
    EncoderBlock,
    Mlp,
    Piece,
    add_block,
    add_decoder,
    add_piece,
    decoder_graph,
    renamed,
)

ImageSize = tuple[int, int]
"""Height and width in pixels."""

_ASSUMED_SIZE = (448, 448)  # for towers that take any image size, if none was given


@dataclass(frozen=True)
class Tower:
    """A vision transformer: how it cuts an image into patches, its layers and extra parameters."""

    hidden: int
    blocks: tuple[EncoderBlock, ...]
    grid: tuple[int, int]  # patches down and across one view of an image
    patch_inputs: int  # numbers in a patch
    prefix: str
    patch_bias: bool = False
    class_tokens: int = 0
    tables: int = 0  # parameters of the position table and the class token
    before_norm: int = 0
    after_norm: int = 0
    windowed: frozenset[int] = frozenset()  # layers whose attention is within a window
    window_side: int = 0
    pool_size: int = 0  # feed-forward size of a pooling head that no language model reads
    is_size_assumed: bool = False  # the tower takes any image size, and none was given
    layer_name: str = "encoder.layers"
    patch_name: str = "embeddings.patch_embedding"


def add_tower(b: Builder, t: Tower) -> tuple[list[str], str]:
    """Append a tower; return its hidden states (embeddings, then each layer) and its output."""
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
    """Append SigLIP's pooling head: one learned query per image. Nothing reads its result."""
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
    """Return a size field that is one number, or a list of two equal numbers (a square)."""
    value = c.raw(name)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise FormatError(f"{c.where}: {name} must be a square; got {quoted_value(value)}")
        return ModelConfig({name: value[0]}, where=c.where).integer(name)
    return c.integer(name)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


def vit_block(c: ModelConfig, *, layer_norms: bool = True) -> EncoderBlock:
    """Return a CLIP layer, which many later towers use. `layer_norms`: False for RMSNorm."""
    hidden, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
    attention = biased_attention(c, hidden, heads, names=PROJECTIONS)
    feed = Mlp(c.integer("intermediate_size"), is_gated=False, bias=True, names=("fc1", "fc2"))
    norm = hidden * (2 if layer_norms else 1)
    return EncoderBlock(attention, feed, norm, norm)


def vit(c: ModelConfig, *, prefix: str) -> Tower:
    """Return a tower of CLIP layers: fixed image size, a learned position for each patch."""
    hidden = c.integer("hidden_size")
    side = edge(c, "image_size") // edge(c, "patch_size")
    if not side:
        raise FormatError(f"{c.where}: patch_size is larger than image_size")
    blocks = (vit_block(c),) * c.integer("num_hidden_layers")
    inputs = c.integer("num_channels", default=3) * edge(c, "patch_size") ** 2
    base = Tower(hidden, blocks, (side, side), inputs, prefix, patch_bias=True)
    return replace(base, tables=side * side * hidden, after_norm=2 * hidden)


def _clip(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """CLIP: a class token, a norm before the layers and a norm of the class token after them."""
    check_size(c, image_size)
    base = vit(c, prefix=prefix)
    norm, tables = 2 * base.hidden, base.tables + 2 * base.hidden
    return replace(base, patch_bias=False, class_tokens=1, tables=tables, before_norm=norm)


def _siglip(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """SigLIP: no class token; a pooling head, whose result a language model does not read."""
    check_size(c, image_size)
    if not c.flag("vision_use_head", default=True):
        return vit(c, prefix=prefix)
    return replace(vit(c, prefix=prefix), pool_size=c.integer("intermediate_size"))


def pixtral(c: ModelConfig, *, prefix: str, image_size: ImageSize | None, merge: int = 1) -> Tower:
    """Pixtral: Llama's layers with bidirectional attention, over an image of any size."""
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
    """Raise UsageError if `image_size` is not the fixed size that this tower resizes images to."""
    side = edge(c, "image_size")
    if image_size is not None and image_size != (side, side):
        raise UsageError(
            f"{c.where}: every image is resized to {side} x {side}; leave out --image-size"
        )


TOWERS = {"clip_vision_model": _clip, "siglip_vision_model": _siglip, "pixtral": pixtral}


def tower_of(c: ModelConfig, *, prefix: str, image_size: ImageSize | None) -> Tower:
    """Return the tower that a `vision_config` describes, by its `model_type`."""
    if c.model_type not in TOWERS:
        raise FormatError(
            f"{c.where}: the vision tower {c.model_type!r} is not known; use {', '.join(TOWERS)}"
        )
    return TOWERS[c.model_type](c, prefix=prefix, image_size=image_size)


def pixels(tower: Tower, c: ModelConfig) -> ImageSize:
    """Return the size that an image is resized to before it is cut into patches."""
    patch = edge(c, "patch_size")
    return tower.grid[0] * patch, tower.grid[1] * patch


def qwen_tower(
    v: ModelConfig, hidden: int, feed: Mlp, norm: int, image_size: ImageSize | None
) -> Tower:
    """Return a Qwen VL tower: fused projections; a patch spans two video frames."""
    names, module = ("", "", "", "proj"), "attn"
    attention = biased_attention(
        v, hidden, v.integer("num_heads"), kv_bias=False, fused="qkv", names=names, module=module
    )
    channels = v.integer("in_channels", "in_chans", default=3)
    blocks = (EncoderBlock(attention, feed, norm, norm),) * v.integer("depth")
    # An image is resized to whole tokens, as the Qwen processors do.
    high, wide = image_size or _ASSUMED_SIZE
    merge = v.integer("spatial_merge_size")
    factor = v.integer("patch_size") * merge
    grid = max(1, round(high / factor)) * merge, max(1, round(wide / factor)) * merge
    inputs = channels * v.integer("temporal_patch_size") * v.integer("patch_size") ** 2
    base = Tower(hidden, blocks, grid, inputs, "model.visual", layer_name="blocks")
    return replace(base, patch_name="patch_embed.proj", is_size_assumed=image_size is None)


# A language model with a tower and projectors.


@dataclass(frozen=True, slots=True)
class Projector:
    """Matrices from the tower to the decoder, and the tower's hidden states that they read."""

    steps: tuple[Piece, ...]
    states: tuple[int, ...] = ()  # as transformers numbers hidden states; none: the tower's output


@dataclass(frozen=True)
class VisionLanguageModel:
    """A tower, projectors and a decoder, and how many tokens an image becomes."""

    family: str
    tower: Tower
    projectors: tuple[Projector, ...]
    text: Decoder
    features: int  # rows of the projector for one view
    image_size: ImageSize
    views: int = 1  # tiles that an image is split into, with the whole image
    tokens: int | None = None  # sequence positions that an image takes, if not `features`
    extra_params: int = 0
    assumptions: tuple[str, ...] = ()


def vision_language_graph(m: VisionLanguageModel) -> Graph:
    """Return the graph of a vision-language model: tower, projectors, decoder."""
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
        "image tokens use causal attention, as text does",
        *m.assumptions,
        *m.text.assumptions,
    )
    text, nodes = m.text, tuple(b.nodes)
    return Graph(m.family, nodes, text.hidden, len(text.layers), text.vocab, assumptions, facts)


def image_facts(tower: Tower) -> dict[str, int]:
    """Return the numbers of patches, features and tokens of an image, which a batch needs."""
    rows, columns = tower.grid
    return {
        "grid_rows": rows,
        "grid_columns": columns,
        "patches_per_view": rows * columns + tower.class_tokens,
        "features_per_view": rows * columns,
        "views_per_image": 1,
        "tokens_per_image": 0,  # image rows take no positions of a text
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
    """Return the language model of `c`; `kind` is its family if the configuration names none."""
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


# Models with unsupported towers, and the family of their language model if no field names it.
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
    """Return the graph of only the language model, for models with unsupported towers."""
    text = text_of(c, kind=LANGUAGE_ALONE[c.model_type])
    line = (
        f"only the language model of {c.model_type} is counted, and only its parameters: its image"
        " and audio towers are not supported; their tokens are part of the sequence"
    )
    return decoder_graph(replace(text, assumptions=(line, *text.assumptions)))


# The outer tie_word_embeddings decides. Older versions wrote it only in text_config for these.
_TIED_BY_EITHER = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl")
# Mistral Small is untied. Its files have no outer field, and that field's default is tied.
_TIED_BY_TEXT = ("mistral3",)
# Their language-model fields are at the top level, not in `text_config`.
_FLAT = ("qwen2_vl", "qwen2_5_vl", "phi4_multimodal")


# Image models and image-text models.


def vit_model(c: ModelConfig, _image_size: ImageSize | None, architecture: str) -> Graph:
    """ViT: a class token; a classifier reads it, or a pooler if there is no classifier."""
    tower = vit(c, prefix="vit")
    tower = _with_class_token(tower, bias=c.flag("qkv_bias", default=True))
    return _one_tower(c, tower, architecture, classified=tower.hidden, has_pooler=True)


def dinov2(c: ModelConfig, _image_size: ImageSize | None, architecture: str) -> Graph:
    """DINOv2: ViT with layer scales; its classifier reads the class token and the patch mean."""
    hidden = c.integer("hidden_size")
    size = c.share("mlp_ratio", hidden)
    tower = vit(c.having("intermediate_size", size), prefix="dinov2")
    tower = _with_class_token(tower, bias=c.flag("qkv_bias", default=True))
    feed = tower.blocks[0].feed
    if c.flag("use_swiglu_ffn", default=False):
        inner = (int(size * 2 / 3) + 7) // 8 * 8
        feed = Mlp(inner, bias=True, fused="weights_in", names=("weights_in", "weights_out"))
    blocks = tuple(replace(block, feed=feed, extra_params=2 * hidden) for block in tower.blocks)
    mask = hidden if c.flag("use_mask_token", default=True) else 0
    tower = replace(tower, blocks=blocks, tables=tower.tables + mask, layer_name="encoder.layer")
    return _one_tower(c, tower, architecture, classified=2 * hidden)


def tower_alone(c: ModelConfig, image_size: ImageSize | None, architecture: str) -> Graph:
    """Return the graph of a CLIP or SigLIP vision tower without its text tower."""
    tower = tower_of(c, prefix="vision_model", image_size=image_size)
    return _one_tower(c, tower, architecture, classified=tower.hidden)


def _with_class_token(tower: Tower, *, bias: bool, output: str = "o_proj") -> Tower:
    """Return the tower with a class token and its position, and ViT's module names."""
    names = ("q_proj", "k_proj", "v_proj", output)
    block = tower.blocks[0]
    attention = replace(block.attention, q_bias=bias, kv_bias=bias, names=names, module="attention")
    return replace(
        tower,
        blocks=(replace(block, attention=attention),) * len(tower.blocks),
        class_tokens=1,
        tables=tower.tables + 2 * tower.hidden,
        layer_name="layers",
        patch_name="embeddings.patch_embeddings.projection",
    )


def _one_tower(
    c: ModelConfig, tower: Tower, architecture: str, *, classified: int, has_pooler: bool = False
) -> Graph:
    """Return the graph of an image model: its tower, and the head of its `architecture`.

    `classified`: the width of the row that a classifier reads.
    """
    b = Builder()
    _, out = add_tower(b, tower)
    images = Builder(b.nodes, stream="images")
    head = head_of(architecture) if architecture else "bare"
    unknown: tuple[str, ...] = ()
    if head == "image classification":
        images.linear("classifier", "head", out, classified, labels_of(c), bias=True, role="head")
    elif head != "bare":
        unknown = (f"the class {architecture} is not known: counted without a head",)
    elif has_pooler:
        wide = c.integer("pooler_output_size", default=tower.hidden)
        images.linear("pooler.dense", "head", out, tower.hidden, wide, bias=True)
    facts = image_facts(tower)
    rows = facts["patches_per_view"]
    facts |= {"tokens_per_image": rows, "image_is_sequence": 1}
    high, wide = pixels(tower, c)
    lines = (f"an image is {high} x {wide} pixels, and a sequence its {rows} patches", *unknown)
    return Graph(c.model_type, tuple(b.nodes), tower.hidden, len(tower.blocks), 0, lines, facts)


def image_text(c: ModelConfig, image_size: ImageSize | None, architecture: str) -> Graph:
    """Return the graph of CLIP or SigLIP: an image tower and a text tower, compared at the end.

    CLIP has a projection above each tower and a learned scale. SigLIP has a pooling head above
    images, a projection above texts, and a learned scale and bias.
    """
    b, is_clip = Builder(), c.model_type == "clip"
    vision = c.part("vision_config", kind=f"{c.model_type}_vision_model")
    tower = tower_of(vision, prefix="vision_model", image_size=image_size)
    add_tower(b, tower)
    b.nodes[:] = renamed(b.nodes, "vision")
    features = b.nodes[-1].name
    if is_clip:
        name, wide = "visual_projection", c.integer("projection_dim")
        features = b.linear(name, "projector", features, tower.hidden, wide, stream="images")
    text = c.part("text_config", kind=f"{c.model_type}_text_model")
    read = _add_text(b, text, "causal" if is_clip else "full")
    hidden = text.integer("hidden_size")
    name = "text_projection" if is_clip else "text_model.head"
    size = wide if is_clip else text.integer("projection_size", default=hidden)
    read = b.linear(name, "projector", read, hidden, size, bias=not is_clip, stream="pooled")
    learned = 1 if is_clip else 2
    b.add("similarity", "residual", (read, features), params=learned, stream="pooled")
    lines = ["a text and an image each; comparing every text with every image is not counted"]
    if architecture and head_of(architecture) != "bare":
        lines.append(f"the class {architecture} is not known: counted as both towers")
    facts = {**image_facts(tower), "learned_positions": text.integer("max_position_embeddings")}
    return replace(_text_graph(b, text), family=c.model_type, assumptions=tuple(lines), facts=facts)


def _add_text(b: Builder, c: ModelConfig, mask: Mask) -> str:
    """Append the text tower of CLIP or SigLIP; return the name of its final norm."""
    block, hidden, at = vit_block(c), c.integer("hidden_size"), "text_model.embeddings"
    block = replace(block, attention=replace(block.attention, mask=mask))
    rows, words = c.integer("max_position_embeddings"), c.integer("vocab_size")
    table = b.add(f"{at}.token_embedding", "embedding", params=words * hidden, role="embedding")
    name, params = f"{at}.position_embedding", rows * hidden
    positions = b.add(name, "embedding", params=params, role="positions")
    x = b.add(f"{at}.sum", "residual", (table, positions))
    for number in range(c.integer("num_hidden_layers")):
        x = add_block(b.within(f"text_model.encoder.layers.{number}"), block, x, hidden)
    return b.add("text_model.final_layer_norm", "norm", x, params=2 * hidden)


def _text_graph(b: Builder, c: ModelConfig) -> Graph:
    hidden, layers = c.integer("hidden_size"), c.integer("num_hidden_layers")
    return Graph(c.model_type, tuple(b.nodes), hidden, layers, c.integer("vocab_size"))


def text_alone(c: ModelConfig, _image_size: ImageSize | None, _architecture: str) -> Graph:
    """Return the graph of CLIP's text tower without its vision tower."""
    b = Builder()
    _add_text(b, c, "causal")
    return _text_graph(b, c)


IMAGES: dict[str, Callable[[ModelConfig, ImageSize | None, str], Graph]] = {
    "vit": vit_model,
    "dinov2": dinov2,
    **dict.fromkeys(("clip", "siglip"), image_text),
    **dict.fromkeys(("clip_vision_model", "siglip_vision_model"), tower_alone),
    "clip_text_model": text_alone,
}


# Qwen's vision-language models, whose towers take an image of any size.

_TILES = "an image that is split into N tiles counts as N + 1 images: the tiles and the whole"
_PIXEL_LIMITS = "the processor's limits on an image's pixels are not applied"


def _vision_language(
    c: ModelConfig,
    vision: ModelConfig,
    tower: Tower,
    text: Decoder,
    *projectors: Projector,
    merge: int = 1,
    **more: Any,  # noqa: ANN401
) -> VisionLanguageModel:
    """Return a model whose projector merges `merge` x `merge` patches into one row."""
    rows, columns = tower.grid
    features = rows * columns // (merge * merge)
    base = VisionLanguageModel(
        c.model_type, tower, projectors, text, features, image_size=pixels(tower, vision)
    )
    return replace(base, **more)


def _qwen(
    c: ModelConfig, v: ModelConfig, tower: Tower, merger: Projector, kind: str
) -> VisionLanguageModel:
    text, merge = text_of(c, kind=kind), v.integer("spatial_merge_size")
    return _vision_language(c, v, tower, text, merger, merge=merge, assumptions=(_PIXEL_LIMITS,))


def _two_matrices(
    names: tuple[str, str], sizes: tuple[int, int, int], *, bias: bool = True, norm: int = 0
) -> tuple[Piece, Piece]:
    """Return a projector of two matrices; `norm`: parameters of the norm before them."""
    first, second, (inputs, inner, outputs) = *names, sizes
    return Piece(first, inputs, inner, bias, norm=norm), Piece(second, inner, outputs, bias)


def _qwen_merger(v: ModelConfig, hidden: int, out: int, norm: int) -> Projector:
    wide = hidden * v.integer("spatial_merge_size") ** 2
    at = "model.visual.merger.mlp"
    return Projector(_two_matrices((f"{at}.0", f"{at}.2"), (wide, wide, out), norm=norm))


def qwen2_vl(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """Qwen2-VL: an image of any size, four patches to a token."""
    v = c.part("vision_config", kind="qwen2_vl_vision")
    hidden = v.integer("embed_dim")
    feed = Mlp(v.share("mlp_ratio", hidden), is_gated=False, bias=True, names=("fc1", "fc2"))
    tower = qwen_tower(v, hidden, feed, 2 * hidden, image_size)
    merger = _qwen_merger(v, hidden, v.integer("hidden_size"), 2 * hidden)
    return _qwen(c, v, tower, merger, "qwen2_vl_text")


def qwen2_5_vl(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """Qwen2.5-VL: in most tower layers attention is within windows of the image."""
    v = c.part("vision_config", kind="qwen2_5_vl_vision")
    hidden = v.integer("hidden_size")
    feed = Mlp(v.integer("intermediate_size"), bias=True)
    tower = qwen_tower(v, hidden, feed, hidden, image_size)
    full = v.integers("fullatt_block_indexes") or []
    merge, patch = v.integer("spatial_merge_size"), v.integer("patch_size")
    tower = replace(
        tower,
        windowed=frozenset(range(len(tower.blocks))) - frozenset(full),
        window_side=v.integer("window_size") // merge // patch * merge,
    )
    merger = _qwen_merger(v, hidden, v.integer("out_hidden_size"), hidden)
    return _qwen(c, v, tower, merger, "qwen2_5_vl_text")


def qwen3_vl(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """Qwen3-VL and 3.5. Qwen3-VL also feeds hidden states of the tower to decoder (DeepStack)."""
    v = c.part("vision_config", kind=f"{c.model_type}_vision")
    hidden = v.integer("hidden_size")
    names = ("linear_fc1", "linear_fc2")
    feed = Mlp(v.integer("intermediate_size"), is_gated=False, bias=True, names=names)
    tower = replace(
        qwen_tower(v, hidden, feed, 2 * hidden, image_size),
        patch_bias=True,
        tables=v.integer("num_position_embeddings") * hidden,
    )
    out, wide = v.integer("out_hidden_size"), hidden * v.integer("spatial_merge_size") ** 2

    def merger(name: str, norm: int, *states: int) -> Projector:
        both = f"model.visual.{name}.linear_fc1", f"model.visual.{name}.linear_fc2"
        return Projector(_two_matrices(both, (wide, wide, out), norm=norm), states)

    taps = v.integers("deepstack_visual_indexes") or []
    deep = tuple(
        merger(f"deepstack_merger_list.{number}", 2 * wide, layer + 1)
        for number, layer in enumerate(taps)
        if layer < len(tower.blocks)
    )
    base = _qwen(c, v, tower, merger("merger", 2 * hidden), f"{c.model_type}_text")
    return replace(base, projectors=(*base.projectors, *deep))


# Other vision-language models.


def _parts(
    c: ModelConfig, image_size: ImageSize | None, vision_kind: str, text_kind: str
) -> tuple[ModelConfig, Tower, Decoder]:
    """Return the tower's configuration, the tower and the language model."""
    vision = c.part("vision_config", kind=vision_kind)
    tower = tower_of(vision, prefix="model.vision_tower", image_size=image_size)
    return vision, tower, text_of(c, kind=text_kind)


def llava(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """LLaVA 1.5, and Pixtral in transformers' format: a tower and a projector of two matrices."""
    vision, tower, text = _parts(c, image_size, "clip_vision_model", "llama")
    has_class = c.word("vision_feature_select_strategy") == "full"
    base = _vision_language(c, vision, tower, text, _projector(c, tower, text))
    return replace(base, features=base.features + (tower.class_tokens if has_class else 0))


def _projector(c: ModelConfig, tower: Tower, text: Decoder) -> Projector:
    """LLaVA's projector of two matrices, reading the hidden states in `vision_feature_layer`."""
    listed = c.raw("vision_feature_layer")
    states = tuple(listed) if isinstance(listed, list) else (-2 if listed is None else listed,)
    count = len(tower.blocks)
    is_layer = [
        type(number) is int and -count - 1 <= number <= count  # true and false are no layers
        for number in states
    ]
    if not is_layer or not all(is_layer):
        raise FormatError(
            f"{c.where}: vision_feature_layer is {quoted_value(listed)};"
            f" must be layers of a tower of {count}"
        )
    has_bias = c.flag("multimodal_projector_bias", default=True)
    wide, at = text.hidden, "model.multi_modal_projector"
    names, sizes = (f"{at}.linear_1", f"{at}.linear_2"), (tower.hidden * len(states), wide, wide)
    return Projector(_two_matrices(names, sizes, bias=has_bias), states)


def llava_next(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """LLaVA-NeXT: the tower sees the whole image and each of its tiles, all at its own size."""
    vision = c.part("vision_config", kind="clip_vision_model")
    base = llava(c, None)
    side = edge(vision, "image_size")
    size = image_size or (2 * side, 2 * side)
    high, wide = _best_tiling(size, _tilings(c, side))
    down, across = high // side, wide // side
    patches = base.tower.grid[0]
    rows, columns = _unpadded(size, down * patches, across * patches)
    return replace(
        base,
        tower=replace(base.tower, is_size_assumed=image_size is None),
        image_size=size,
        views=1 + down * across,
        tokens=patches * patches + rows * (columns + 1),
        extra_params=base.text.hidden,
    )


def _tilings(c: ModelConfig, side: int) -> list[ImageSize]:
    """Return the sizes that an image may be resized to, each a whole number of tiles."""
    pins = c.raw("image_grid_pinpoints")
    if pins is None:
        rows = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
        return [(side * high, side * wide) for high, wide in rows]
    is_list = isinstance(pins, list) and pins
    if not is_list or not all(isinstance(pin, list) and len(pin) == 2 for pin in pins):
        raise FormatError(
            f"{c.where}: image_grid_pinpoints must be a list of pairs; got {quoted_value(pins)}"
        )
    tilings = [(high, wide) for high, wide in pins]
    if any(not isinstance(length, int) or length < side for pin in tilings for length in pin):
        raise FormatError(
            f"{c.where}: image_grid_pinpoints has sizes below {side}; got {quoted_value(pins)}"
        )
    return tilings


def _best_tiling(size: ImageSize, choices: list[ImageSize]) -> ImageSize:
    """Return the tiling that keeps the most image pixels; among equals, the least padding."""
    high, wide = size

    def pixels_kept(choice: ImageSize) -> tuple[int, int]:
        scale = min(choice[0] / high, choice[1] / wide)
        used = min(int(high * scale) * int(wide * scale), high * wide)
        return used, used - choice[0] * choice[1]

    return max(choices, key=pixels_kept)


def _unpadded(size: ImageSize, rows: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of features that remain after the padding's are dropped."""
    high, wide = size
    if wide / high > columns / rows:
        margin = (rows - int(round(high * (columns / wide), 7))) // 2
        return rows - 2 * margin, columns
    margin = (columns - int(round(wide * (rows / high), 7))) // 2
    return rows, columns - 2 * margin


def paligemma(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """PaliGemma: a SigLIP tower, a projector of one matrix, and Gemma."""
    vision, tower, text = _parts(c, image_size, "siglip_vision_model", "gemma")
    step = Piece("model.multi_modal_projector.linear", tower.hidden, text.hidden, bias=True)
    return _vision_language(c, vision, tower, text, Projector((step,)))


def gemma3(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """Gemma 3 with images: patches are average-pooled to a fixed number of tokens."""
    vision, tower, text = _parts(c, image_size, "siglip_vision_model", "gemma3_text")
    name, wide = "model.multi_modal_projector.mm_input_projection", tower.hidden
    projector = Projector((Piece(name, wide, text.hidden, norm=wide),))
    tokens = c.integer("mm_tokens_per_image", default=256)
    return _vision_language(c, vision, tower, text, projector, features=tokens)


def mistral3(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """Mistral Small 3.1: a Pixtral tower, four patches to a token."""
    vision = c.part("vision_config", kind="pixtral")
    merge = c.integer("spatial_merge_size", default=2)
    tower = pixtral(vision, prefix="model.vision_tower", image_size=image_size, merge=merge)
    text = text_of(c, kind="mistral")
    base = _projector(c, tower, text)
    states = base.states if "vision_feature_layer" in c else (-1,)
    name, wide = "model.multi_modal_projector.patch_merger.merging_layer", tower.hidden
    merger = Piece(name, wide * merge * merge, wide, norm=wide)
    has_bias = c.flag("multimodal_projector_bias", default=False)
    steps = tuple(replace(step, bias=has_bias) for step in base.steps)
    projector = Projector((merger, *steps), states)
    return _vision_language(c, vision, tower, text, projector, merge=merge)


def idefics3(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """Idefics 3 and SmolVLM: a SigLIP tower, several patches joined into one token."""
    vision = c.part("vision_config", kind=f"{c.model_type}_vision")
    check_size(vision, image_size)
    tower = vit(vision, prefix="model.vision_model")
    text = text_of(c, kind="llama", prefix="model.text_model")
    merge = c.integer("scale_factor", default=2)
    name = "model.connector.modality_projection.proj"
    step = Piece(name, tower.hidden * merge * merge, text.hidden)
    return _vision_language(
        c, vision, tower, text, Projector((step,)), merge=merge, assumptions=(_TILES,)
    )


def internvl(c: ModelConfig, image_size: ImageSize | None) -> VisionLanguageModel:
    """InternVL 2.5 and 3 in transformers' format: four patches joined into one token."""
    vision = c.part("vision_config", kind="internvl_vision")
    check_size(vision, image_size)
    tower = vit(vision, prefix="model.vision_tower")
    has_bias = vision.flag("attention_bias", default=False)
    tower = _with_class_token(tower, bias=has_bias, output="projection_layer")
    hidden, block = tower.hidden, tower.blocks[0]
    norm = hidden if vision.word("norm_type") == "rms_norm" else 2 * hidden
    qk_norms = 2 * hidden if vision.flag("use_qk_norm", default=False) else 0
    attention = replace(block.attention, norm_params=qk_norms)
    block = replace(block, attention=attention, norm=norm, feed_norm=norm, extra_params=2 * hidden)
    tower = replace(tower, blocks=(block,) * len(tower.blocks), layer_name="encoder.layer")
    if not vision.flag("use_absolute_position_embeddings", default=True):
        tower = replace(tower, tables=hidden)
    if vision.flag("use_mean_pooling", default=True):
        tower = replace(tower, after_norm=0)
    text = text_of(c, kind="qwen2")
    merge = round(1 / c.number("downsample_ratio", default=0.5))
    if not 1 <= merge <= min(tower.grid):
        raise FormatError(
            f"{c.where}: downsample_ratio is {c.raw('downsample_ratio')}; must be from"
            f" 1/{tower.grid[0]} (the patches across an image) to 1"
        )
    wide = hidden * merge * merge
    at = "model.multi_modal_projector"
    names, out = (f"{at}.linear_1", f"{at}.linear_2"), text.hidden
    projector = Projector(_two_matrices(names, (wide, out, out), norm=2 * wide))
    return _vision_language(c, vision, tower, text, projector, merge=merge, assumptions=(_TILES,))


VISION: dict[str, Callable[[ModelConfig, ImageSize | None], VisionLanguageModel]] = {
    "llava": llava,
    "llava_next": llava_next,
    "paligemma": paligemma,
    "gemma3": gemma3,
    "mistral3": mistral3,
    **dict.fromkeys(("idefics3", "smolvlm"), idefics3),
    "internvl": internvl,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), qwen3_vl),
}

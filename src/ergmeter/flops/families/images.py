"""Models of images alone, and of images beside the texts they are compared with: ViT, CLIP, SigLIP.

The trap: a sequence length. That of an image is its patches and nobody's to choose; that of a text
beside it is its own. So a batch of a ViT is its images, and a batch of CLIP has both, each counted
in the rows of its own tower.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.flops.config import head_of
from ergmeter.flops.graph.encoder_block import EncoderBlock, add_block, biased_attention, renamed
from ergmeter.flops.graph.graph import Builder, Graph
from ergmeter.flops.graph.heads import labels_of
from ergmeter.flops.graph.layers import Mlp
from ergmeter.flops.graph.vision import vision_of
from ergmeter.flops.graph.vision_towers import add_tower, pixels, tower_of, vit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.graph import Mask
    from ergmeter.flops.graph.vision_towers import ImageSize, Tower


def vit_model(c: ModelConfig, _image_size: ImageSize | None, architecture: str) -> Graph:
    """ViT: a class token, and a classifier on it or, without one, a pooler."""
    tower = _with_class_token(c, vit(c, prefix="vit"))
    return _one_tower(c, tower, architecture, classified=tower.hidden, has_pooler=True)


def dinov2(c: ModelConfig, _image_size: ImageSize | None, architecture: str) -> Graph:
    """DINOv2: ViT with a scale for each channel; the class and the mean are classified together."""
    hidden = c.whole("hidden_size")
    size = c.share("mlp_ratio", hidden)
    tower = _with_class_token(c, vit(c.having("intermediate_size", size), prefix="dinov2"))
    feed = tower.blocks[0].feed
    if c.flag("use_swiglu_ffn", default=False):
        inner = (int(size * 2 / 3) + 7) // 8 * 8
        feed = Mlp(inner, bias=True, fused="weights_in", names=("weights_in", "weights_out"))
    blocks = tuple(replace(block, feed=feed, extra_params=2 * hidden) for block in tower.blocks)
    mask = hidden if c.flag("use_mask_token", default=True) else 0
    tower = replace(tower, blocks=blocks, tables=tower.tables + mask, layer_name="encoder.layer")
    return _one_tower(c, tower, architecture, classified=2 * hidden)


def tower_alone(c: ModelConfig, image_size: ImageSize | None, architecture: str) -> Graph:
    """The tower of CLIP or SigLIP by itself."""
    tower = tower_of(c, prefix="vision_model", image_size=image_size)
    return _one_tower(c, tower, architecture, classified=tower.hidden)


def _with_class_token(c: ModelConfig, tower: Tower) -> Tower:
    """The same tower with a class token, which has a position too, as transformers names it."""
    bias = c.flag("qkv_bias", default=True)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
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
    """The graph of a model of images alone: its tower, and the head of its class."""
    b = Builder()
    _, out = add_tower(b, tower)
    head = head_of(architecture) if architecture else "bare"
    unknown: tuple[str, ...] = ()
    if head == "image classification":
        labels = labels_of(c)
        name = "classifier"
        b.linear(name, "head", out, classified, labels, bias=True, stream="images", role="head")
    elif head != "bare":
        unknown = (f"the class {architecture} is not known: counted without a head",)
    elif has_pooler:
        wide = c.whole("pooler_output_size", default=tower.hidden)
        b.linear("pooler.dense", "head", out, tower.hidden, wide, bias=True, stream="images")
    facts = _facts(tower)
    rows = facts["patches_per_view"]
    facts |= {"tokens_per_image": rows, "image_is_sequence": 1}
    high, wide = pixels(tower, c)
    lines = (f"an image is {high} x {wide} pixels, and a sequence its {rows} patches", *unknown)
    return Graph(c.model_type, tuple(b.nodes), tower.hidden, len(tower.blocks), 0, lines, facts)


def _facts(tower: Tower) -> dict[str, int]:
    """What a batch needs to know of an image."""
    rows, columns = tower.grid
    return {
        "grid_rows": rows,
        "grid_columns": columns,
        "patches_per_view": rows * columns + tower.class_tokens,
        "features_per_view": rows * columns,
        "views_per_image": 1,
        "tokens_per_image": 0,  # they are no part of a text
    }


def clip(c: ModelConfig, image_size: ImageSize | None, architecture: str) -> Graph:
    """CLIP: two towers, and a matrix from each to where they are compared; one learned scale."""
    b = Builder()
    tower, seen = _add_images(b, c, image_size)
    size = c.whole("projection_dim")
    seen = b.linear("visual_projection", "projector", seen, tower.hidden, size, stream="images")
    text = c.part("text_config", kind="clip_text_model")
    read = _add_text(b, text, "causal")
    hidden = text.whole("hidden_size")
    read = b.linear("text_projection", "projector", read, hidden, size, stream="pooled")
    return _compared(b, c, text, tower, (read, seen), architecture, learned=1)


def siglip(c: ModelConfig, image_size: ImageSize | None, architecture: str) -> Graph:
    """SigLIP: a pooling head above the images, a matrix above the texts; a scale and a bias."""
    b = Builder()
    tower, seen = _add_images(b, c, image_size)
    text = c.part("text_config", kind="siglip_text_model")
    read = _add_text(b, text, "full")
    hidden = text.whole("hidden_size")
    size = text.whole("projection_size", default=hidden)
    name = "text_model.head"
    read = b.linear(name, "projector", read, hidden, size, bias=True, stream="pooled")
    return _compared(b, c, text, tower, (read, seen), architecture, learned=2)


def _add_images(b: Builder, c: ModelConfig, image_size: ImageSize | None) -> tuple[Tower, str]:
    vision = vision_of(c, f"{c.model_type}_vision_model")
    tower = tower_of(vision, prefix="vision_model", image_size=image_size)
    inner = Builder()
    add_tower(inner, tower)
    b.nodes.extend(renamed(inner.nodes, "vision"))
    return tower, b.nodes[-1].name


def _add_text(b: Builder, c: ModelConfig, mask: Mask) -> str:
    """Append the reader of texts; returns its last norm."""
    hidden, at = c.whole("hidden_size"), "text_model"
    names = ("q_proj", "k_proj", "v_proj", "out_proj")
    heads = c.whole("num_attention_heads")
    attention = biased_attention(c, hidden, heads, mask=mask, names=names)
    feed = Mlp(c.whole("intermediate_size"), is_gated=False, bias=True, names=("fc1", "fc2"))
    block = EncoderBlock(attention, feed, 2 * hidden, 2 * hidden)
    rows, words = c.whole("max_position_embeddings"), c.whole("vocab_size")
    table = b.add(f"{at}.embeddings.token_embedding", "embedding", params=words * hidden,
                  role="embedding")  # fmt: skip
    places = b.add(f"{at}.embeddings.position_embedding", "embedding", params=rows * hidden,
                   role="positions")  # fmt: skip
    x = b.add(f"{at}.embeddings.sum", "residual", (table, places))
    for number in range(c.whole("num_hidden_layers")):
        name = f"{at}.encoder.layers.{number}"
        x = add_block(b, block, x, name=name, hidden=hidden, stream="tokens")
    return b.add(f"{at}.final_layer_norm", "norm", x, params=2 * hidden)


def _compared(
    b: Builder,
    c: ModelConfig,
    text: ModelConfig,
    tower: Tower,
    both: tuple[str, str],
    architecture: str,
    *,
    learned: int,
) -> Graph:
    """The graph of two towers whose results are compared."""
    b.add("similarity", "residual", both, params=learned, stream="pooled")
    lines = ["a text and an image each; comparing every text with every image is not counted"]
    if architecture and head_of(architecture) != "bare":
        lines.append(f"the class {architecture} is not known: counted as both towers")
    facts = {**_facts(tower), "learned_positions": text.whole("max_position_embeddings")}
    hidden, layers = text.whole("hidden_size"), text.whole("num_hidden_layers")
    words = text.whole("vocab_size")
    return Graph(c.model_type, tuple(b.nodes), hidden, layers, words, tuple(lines), facts)


def text_alone(c: ModelConfig, _image_size: ImageSize | None, _architecture: str) -> Graph:
    """CLIP's reader of texts by itself."""
    b = Builder()
    _add_text(b, c, "causal")
    hidden, layers = c.whole("hidden_size"), c.whole("num_hidden_layers")
    return Graph(c.model_type, tuple(b.nodes), hidden, layers, c.whole("vocab_size"))


IMAGES: dict[str, Callable[[ModelConfig, ImageSize | None, str], Graph]] = {
    "vit": vit_model,
    "dinov2": dinov2,
    "clip": clip,
    "clip_vision_model": tower_alone,
    "clip_text_model": text_alone,
    "siglip": siglip,
    "siglip_vision_model": tower_alone,
}

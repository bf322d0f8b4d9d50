"""Vision-language models by family: which tower, which projector, which decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.config import shown_value
from ergmeter.flops.graph.layers import Mlp
from ergmeter.flops.graph.vision import Projector, ProjectorStep, Seeing, text_of, vision_of
from ergmeter.flops.graph.vision_towers import (
    check_size,
    edge,
    pixels,
    pixtral,
    qwen_tower,
    tower_of,
    vit,
    vit_block,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.layers import Decoder
    from ergmeter.flops.graph.vision_towers import ImageSize, Tower

# -- qwen vl ---------------------------------------------------------------------------------------
# The Qwen family's vision-language models: towers that take an image as it is.


_PIXEL_LIMITS = "the processor's limits on an image's pixels are not applied"


def _qwen(c: ModelConfig, v: ModelConfig, tower: Tower, merger: Projector, kind: str) -> Seeing:
    merge = v.whole("spatial_merge_size")
    rows, columns = tower.grid
    return Seeing(
        c.model_type,
        tower,
        (merger,),
        text_of(c, kind=kind),
        features=rows * columns // (merge * merge),
        image_size=pixels(tower, v),
        assumptions=(_PIXEL_LIMITS,),
    )


def _qwen_merger(v: ModelConfig, hidden: int, out: int, norm: int) -> Projector:
    wide = hidden * v.whole("spatial_merge_size") ** 2
    at = "model.visual.merger.mlp"
    first = ProjectorStep(f"{at}.0", wide, wide, bias=True, norm=norm)
    return Projector((first, ProjectorStep(f"{at}.2", wide, out, bias=True)))


def qwen2_vl(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """Qwen2-VL: an image of any size, four patches to a token."""
    v = vision_of(c, "qwen2_vl_vision")
    hidden = v.whole("embed_dim")
    size = v.share("mlp_ratio", hidden)
    feed = Mlp(size, is_gated=False, bias=True, names=("fc1", "fc2"))
    tower = qwen_tower(v, hidden, feed, 2 * hidden, image_size)
    merger = _qwen_merger(v, hidden, v.whole("hidden_size"), 2 * hidden)
    return _qwen(c, v, tower, merger, "qwen2_vl_text")


def qwen2_5_vl(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """Qwen2.5-VL: most layers of the tower see windows of the image only."""
    v = vision_of(c, "qwen2_5_vl_vision")
    hidden = v.whole("hidden_size")
    feed = Mlp(v.whole("intermediate_size"), bias=True)
    tower = qwen_tower(v, hidden, feed, hidden, image_size)
    whole = v.wholes("fullatt_block_indexes") or []
    merge, patch = v.whole("spatial_merge_size"), v.whole("patch_size")
    tower = replace(
        tower,
        windowed=frozenset(range(len(tower.blocks))) - frozenset(whole),
        window_side=v.whole("window_size") // merge // patch * merge,
    )
    merger = _qwen_merger(v, hidden, v.whole("out_hidden_size"), hidden)
    return _qwen(c, v, tower, merger, "qwen2_5_vl_text")


def qwen3_vl(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """Qwen3-VL and 3.5: in the first, decoder layers are also given what lower layers have seen."""
    v = vision_of(c, f"{c.model_type}_vision")
    hidden = v.whole("hidden_size")
    names = ("linear_fc1", "linear_fc2")
    feed = Mlp(v.whole("intermediate_size"), is_gated=False, bias=True, names=names)
    tower = replace(
        qwen_tower(v, hidden, feed, 2 * hidden, image_size),
        patch_bias=True,
        tables=v.whole("num_position_embeddings") * hidden,
    )
    out, wide = v.whole("out_hidden_size"), hidden * v.whole("spatial_merge_size") ** 2

    def merger(name: str, norm: int, *states: int) -> Projector:
        first = ProjectorStep(f"model.visual.{name}.linear_fc1", wide, wide, bias=True, norm=norm)
        return Projector(
            (first, ProjectorStep(f"model.visual.{name}.linear_fc2", wide, out, True)), states
        )

    taps = v.wholes("deepstack_visual_indexes") or []
    deep = tuple(
        merger(f"deepstack_merger_list.{number}", 2 * wide, layer + 1)
        for number, layer in enumerate(taps)
        if layer < len(tower.blocks)
    )
    base = _qwen(c, v, tower, merger("merger", 2 * hidden), f"{c.model_type}_text")
    return replace(base, projectors=(*base.projectors, *deep))


# -- seeing ----------------------------------------------------------------------------------------


def llava(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """LLaVA 1.5, and Pixtral as transformers has it: two matrices above a tower."""
    vision = vision_of(c, "clip_vision_model")
    tower = tower_of(vision, prefix="model.vision_tower", image_size=image_size)
    text = text_of(c, kind="llama")
    has_class = c.word("vision_feature_select_strategy") == "full"
    rows, columns = tower.grid
    return Seeing(
        c.model_type,
        tower,
        (_two_matrices(c, tower, text),),
        text,
        features=rows * columns + (tower.class_tokens if has_class else 0),
        image_size=pixels(tower, vision),
    )


def _two_matrices(c: ModelConfig, tower: Tower, text: Decoder) -> Projector:
    listed = c.raw("vision_feature_layer")
    states = tuple(listed) if isinstance(listed, list) else (-2 if listed is None else listed,)
    count = len(tower.blocks)
    is_layer = [
        type(number) is int and -count - 1 <= number <= count  # true and false are no layers
        for number in states
    ]
    if not is_layer or not all(is_layer):
        raise FormatError(
            f"{c.where}: vision_feature_layer {shown_value(listed)}"
            f" is no layer of a tower of {count}"
        )
    has_bias = c.flag("multimodal_projector_bias", default=True)
    wide = text.hidden
    first = ProjectorStep(
        "model.multi_modal_projector.linear_1", tower.hidden * len(states), wide, has_bias
    )
    second = ProjectorStep("model.multi_modal_projector.linear_2", wide, wide, has_bias)
    return Projector((first, second), states)


def llava_next(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """LLaVA-NeXT: an image is seen whole and in tiles, each as large as the tower's image."""
    vision = vision_of(c, "clip_vision_model")
    base = llava(c, None)
    side = edge(vision, "image_size")
    size = image_size or (2 * side, 2 * side)
    high, wide = _best_tiling(size, _tilings(c, side))
    down, across = high // side, wide // side
    one = base.tower.grid[0]
    rows, columns = _unpadded(size, down * one, across * one)
    return replace(
        base,
        tower=replace(base.tower, is_size_assumed=image_size is None),
        image_size=size,
        views=1 + down * across,
        tokens=one * one + rows * (columns + 1),
        extra_params=base.text.hidden,
    )


def _tilings(c: ModelConfig, side: int) -> list[ImageSize]:
    """The sizes an image may be brought to, each of whole tiles."""
    pins = c.raw("image_grid_pinpoints")
    if pins is None:
        rows = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
        return [(side * high, side * wide) for high, wide in rows]
    is_list = isinstance(pins, list) and pins
    if not is_list or not all(isinstance(pin, list) and len(pin) == 2 for pin in pins):
        raise FormatError(
            f"{c.where}: image_grid_pinpoints must be a list of pairs; got {shown_value(pins)}"
        )
    found = [(high, wide) for high, wide in pins]
    if any(not isinstance(length, int) or length < side for pin in found for length in pin):
        raise FormatError(
            f"{c.where}: image_grid_pinpoints has sizes below one tile; got {shown_value(pins)}"
        )
    return found


def _best_tiling(size: ImageSize, choices: list[ImageSize]) -> ImageSize:
    """The tiling that keeps most of an image's pixels and, of those, wastes least."""
    high, wide = size

    def kept(choice: ImageSize) -> tuple[int, int]:
        scale = min(choice[0] / high, choice[1] / wide)
        used = min(int(high * scale) * int(wide * scale), high * wide)
        return used, used - choice[0] * choice[1]

    return max(choices, key=kept)


def _unpadded(size: ImageSize, rows: int, columns: int) -> tuple[int, int]:
    """The rows and columns of features that are left when those of the padding are dropped."""
    high, wide = size
    if wide / high > columns / rows:
        margin = (rows - int(round(high * (columns / wide), 7))) // 2
        return rows - 2 * margin, columns
    margin = (columns - int(round(wide * (rows / high), 7))) // 2
    return rows, columns - 2 * margin


def paligemma(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """PaliGemma: SigLIP, one matrix, Gemma."""
    vision = vision_of(c, "siglip_vision_model")
    tower = tower_of(vision, prefix="model.vision_tower", image_size=image_size)
    text = text_of(c, kind="gemma")
    step = ProjectorStep("model.multi_modal_projector.linear", tower.hidden, text.hidden, bias=True)
    rows, columns = tower.grid
    return Seeing(
        "paligemma",
        tower,
        (Projector((step,)),),
        text,
        features=rows * columns,
        image_size=pixels(tower, vision),
    )


def gemma3(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """Gemma 3 with its tower: patches are averaged down to a fixed number of tokens."""
    vision = vision_of(c, "siglip_vision_model")
    tower = tower_of(vision, prefix="model.vision_tower", image_size=image_size)
    text = text_of(c, kind="gemma3_text")
    step = ProjectorStep(
        "model.multi_modal_projector.mm_input_projection",
        tower.hidden,
        text.hidden,
        False,
        tower.hidden,
    )
    return Seeing(
        "gemma3",
        tower,
        (Projector((step,)),),
        text,
        features=c.whole("mm_tokens_per_image", default=256),
        image_size=pixels(tower, vision),
    )


def mistral3(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """Mistral Small 3.1: Pixtral, four patches to a token."""
    vision = vision_of(c, "pixtral")
    merge = c.whole("spatial_merge_size", default=2)
    tower = pixtral(vision, prefix="model.vision_tower", image_size=image_size, merge=merge)
    text = text_of(c, kind="mistral")
    base = _two_matrices(c, tower, text)
    states = base.states if "vision_feature_layer" in c else (-1,)
    merger = ProjectorStep(
        "model.multi_modal_projector.patch_merger.merging_layer",
        tower.hidden * merge * merge,
        tower.hidden,
        norm=tower.hidden,
    )
    has_bias = c.flag("multimodal_projector_bias", default=False)
    steps = tuple(replace(step, bias=has_bias) for step in base.steps)
    rows, columns = tower.grid
    return Seeing(
        "mistral3",
        tower,
        (Projector((merger, *steps), states),),
        text,
        features=rows * columns // (merge * merge),
        image_size=pixels(tower, vision),
    )


def idefics3(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """Idefics 3 and SmolVLM: SigLIP, several patches shuffled into one token."""
    vision = vision_of(c, f"{c.model_type}_vision")
    check_size(vision, image_size)
    tower = vit(vision, prefix="model.vision_model")
    text = text_of(c, kind="llama", prefix="model.text_model")
    merge = c.whole("scale_factor", default=2)
    name = "model.connector.modality_projection.proj"
    step = ProjectorStep(name, tower.hidden * merge * merge, text.hidden)
    rows, columns = tower.grid
    return Seeing(
        c.model_type,
        tower,
        (Projector((step,)),),
        text,
        features=rows * columns // (merge * merge),
        image_size=pixels(tower, vision),
        assumptions=("an image that is split into tiles counts as so many images, and one more",),
    )


def internvl(c: ModelConfig, image_size: ImageSize | None) -> Seeing:
    """InternVL 2.5 and 3 as transformers has them: four patches shuffled into one token."""
    vision = vision_of(c, "internvl_vision")
    check_size(vision, image_size)
    base = vit(vision, prefix="model.vision_tower")
    hidden = base.hidden
    has_bias = vision.flag("attention_bias", default=False)
    block = vit_block(vision, layer_norms=vision.word("norm_type") != "rms_norm")
    attention = replace(
        block.attention,
        q_bias=has_bias,
        kv_bias=has_bias,
        norm_params=2 * hidden if vision.flag("use_qk_norm", default=False) else 0,
        names=("q_proj", "k_proj", "v_proj", "projection_layer"),
        module="attention",
    )
    blocks = (replace(block, attention=attention, extra_params=2 * hidden),) * len(base.blocks)
    has_positions = vision.flag("use_absolute_position_embeddings", default=True)
    is_pooled = vision.flag("use_mean_pooling", default=True)
    tower = replace(
        base,
        blocks=blocks,
        class_tokens=1,
        tables=base.tables + 2 * hidden if has_positions else hidden,
        after_norm=0 if is_pooled else 2 * hidden,
        layer_name="encoder.layer",
        patch_name="embeddings.patch_embeddings.projection",
    )
    text = text_of(c, kind="qwen2")
    merge = round(1 / c.number("downsample_ratio", default=0.5))
    if not 1 <= merge <= min(base.grid):
        raise FormatError(
            f"{c.where}: downsample_ratio {c.raw('downsample_ratio')} does not fit a grid of"
            f" {base.grid[0]} patches"
        )
    wide = hidden * merge * merge
    at = "model.multi_modal_projector"
    first = ProjectorStep(f"{at}.linear_1", wide, text.hidden, bias=True, norm=2 * wide)
    second = ProjectorStep(f"{at}.linear_2", text.hidden, text.hidden, bias=True)
    rows, columns = tower.grid
    return Seeing(
        "internvl",
        tower,
        (Projector((first, second)),),
        text,
        features=rows * columns // (merge * merge),
        image_size=pixels(tower, vision),
        assumptions=("an image that is split into tiles counts as so many images, and one more",),
    )


VISION: dict[str, Callable[[ModelConfig, ImageSize | None], Seeing]] = {
    "llava": llava,
    "llava_next": llava_next,
    "paligemma": paligemma,
    "gemma3": gemma3,
    "mistral3": mistral3,
    "idefics3": idefics3,
    "smolvlm": idefics3,
    "internvl": internvl,
    "qwen2_vl": qwen2_vl,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl,
    "qwen3_5": qwen3_vl,
    "qwen3_5_moe": qwen3_vl,
}

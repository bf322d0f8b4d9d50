"""The Qwen family's vision-language models: towers that take an image as it is."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ergmeter.flops.layers import Mlp
from ergmeter.flops.towers import (
    pixels,
    qwen_tower,
)
from ergmeter.flops.vision import Projector, Seeing, Step, text_of, vision_of

if TYPE_CHECKING:
    from ergmeter.flops.config import Config
    from ergmeter.flops.towers import ImageSize, Tower
    from ergmeter.flops.vision import Seeing


_PIXEL_LIMITS = "the processor's limits on an image's pixels are not applied"


def _qwen(c: Config, v: Config, tower: Tower, merger: Projector, kind: str) -> Seeing:
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


def _qwen_merger(v: Config, hidden: int, out: int, norm: int) -> Projector:
    wide = hidden * v.whole("spatial_merge_size") ** 2
    at = "model.visual.merger.mlp"
    first = Step(f"{at}.0", wide, wide, bias=True, norm=norm)
    return Projector((first, Step(f"{at}.2", wide, out, bias=True)))


def qwen2_vl(c: Config, image_size: ImageSize | None) -> Seeing:
    """Qwen2-VL: an image of any size, four patches to a token."""
    v = vision_of(c, "qwen2_vl_vision")
    hidden = v.whole("embed_dim")
    size = v.share("mlp_ratio", hidden)
    feed = Mlp(size, is_gated=False, bias=True, names=("fc1", "fc2"))
    tower = qwen_tower(v, hidden, feed, 2 * hidden, image_size)
    merger = _qwen_merger(v, hidden, v.whole("hidden_size"), 2 * hidden)
    return _qwen(c, v, tower, merger, "qwen2_vl_text")


def qwen2_5_vl(c: Config, image_size: ImageSize | None) -> Seeing:
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


def qwen3_vl(c: Config, image_size: ImageSize | None) -> Seeing:
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
        first = Step(f"model.visual.{name}.linear_fc1", wide, wide, bias=True, norm=norm)
        return Projector((first, Step(f"model.visual.{name}.linear_fc2", wide, out, True)), states)

    taps = v.wholes("deepstack_visual_indexes") or []
    deep = tuple(
        merger(f"deepstack_merger_list.{number}", 2 * wide, layer + 1)
        for number, layer in enumerate(taps)
        if layer < len(tower.blocks)
    )
    base = _qwen(c, v, tower, merger("merger", 2 * hidden), f"{c.model_type}_text")
    return replace(base, projectors=(*base.projectors, *deep))

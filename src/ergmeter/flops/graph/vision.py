"""Language models that see: a vision tower, a projector, and the decoder they feed.

The trap: counting an image by the tokens it becomes. A tower works on patches, four or sixteen of
them to a token, and its cost is its own; the tokens are part of the text's sequence and already in
its length. And what is trained matters more here than elsewhere: the usual recipes freeze the
tower, so that it costs its forward pass and nothing else, while the projector above it gets
gradients through the whole decoder. All of that follows from the tower feeding the decoder's input.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.families.decoders import DECODERS
from ergmeter.flops.families.llamas import qwen2, qwen3_full
from ergmeter.flops.families.mixtures import qwen3_moe_full
from ergmeter.flops.graph.decoder import add_decoder, decoder_graph
from ergmeter.flops.graph.encoder_block import renamed
from ergmeter.flops.graph.graph import Builder, Graph
from ergmeter.flops.graph.vision_towers import add_tower

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.layers import Decoder
    from ergmeter.flops.graph.vision_towers import ImageSize, Tower


@dataclass(frozen=True, slots=True)
class ProjectorStep:
    """One matrix of a projector, with the norm before it."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    norm: int = 0


@dataclass(frozen=True, slots=True)
class Projector:
    """From the tower to the decoder: after which of its layers, and through what."""

    steps: tuple[ProjectorStep, ...]
    states: tuple[int, ...] = ()  # as transformers counts hidden states; none: the tower's result


@dataclass(frozen=True)
class Seeing:
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


def seeing_graph(m: Seeing) -> Graph:
    """The graph of a vision-language model."""
    b = Builder()
    states, result = add_tower(b, m.tower)
    nodes = renamed(b.nodes, "vision")
    b = Builder()
    b.nodes.extend(nodes)
    seen = tuple(_add_projector(b, each, states, result) for each in m.projectors)
    if m.extra_params:
        seen = (*seen, b.add("model.image_newline", "embedding", params=m.extra_params))
    add_decoder(b, m.text, inputs=seen)
    tokens = m.tokens or m.features
    high, wide = m.image_size
    rows, columns = m.tower.grid
    facts = {
        "grid_rows": rows,
        "grid_columns": columns,
        "patches_per_view": rows * columns + m.tower.class_tokens,
        "features_per_view": m.features,
        "views_per_image": m.views,
        "tokens_per_image": tokens,
    }
    if m.tower.window_side:
        facts["window_side"] = m.tower.window_side
    unsaid = "no image size was given: " if m.tower.is_size_assumed else ""
    said = (
        f"{unsaid}an image is {high} x {wide} pixels,"
        f" {m.views * facts['patches_per_view']} patches to the tower,"
        f" and {tokens} tokens that the sequence length includes",
        "image tokens attend as text does, each to those before it",
        *m.assumptions,
        *m.text.assumptions,
    )
    return Graph(
        m.family, tuple(b.nodes), m.text.hidden, len(m.text.layers), m.text.vocab, said, facts
    )


def _add_projector(b: Builder, projector: Projector, states: list[str], result: str) -> str:
    taken = tuple(states[number] for number in projector.states) or (result,)
    for step in projector.steps:
        if step.norm:
            taken = (
                b.add(f"{step.name}.norm", "norm", taken, params=step.norm, stream="features"),
            )
        taken = (
            b.linear(
                step.name,
                "projector",
                taken,
                step.inputs,
                step.outputs,
                bias=step.bias,
                stream="features",
            ),
        )
    return taken[0]


# -- the parts of a configuration ------------------------------------------------------------------

TEXTS: dict[str, Callable[[ModelConfig], Decoder]] = {
    **DECODERS,
    "qwen2_vl_text": qwen2,
    "qwen2_5_vl_text": qwen2,
    "qwen3_vl_text": qwen3_full,
    "qwen3_vl_moe_text": qwen3_moe_full,
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


def vision_of(c: ModelConfig, kind: str) -> ModelConfig:
    """The tower's part, with what that kind of tower has where it says nothing."""
    return c.part("vision_config", kind=kind)

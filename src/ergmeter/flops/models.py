"""From a configuration to the graph of its model, whatever its family."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.families.berts import ENCODERS
from ergmeter.flops.families.decoders import DECODERS
from ergmeter.flops.families.images import IMAGES
from ergmeter.flops.families.seq2seq import SEQ2SEQ, seq2seq_graph
from ergmeter.flops.families.vision_families import VISION
from ergmeter.flops.graph.activation_traits import traits
from ergmeter.flops.graph.decoder import decoder_graph
from ergmeter.flops.graph.encoders import encoder_graph
from ergmeter.flops.graph.heads import with_head
from ergmeter.flops.graph.vision import LANGUAGE_ALONE, language_alone, seeing_graph

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.graph.vision_towers import ImageSize


class UnknownArchitectureError(FormatError):
    """A `model_type` that no reader is for; `said` is that alone, without what to do."""

    def __init__(self, where: str, said: str, *, instead: str = "") -> None:
        self.said = said
        advice = instead or (
            "if its layers are like a known family's, put that in model_type"
            " (llama, qwen3, mixtral, gpt2, ...), or pass its dimensions:"
            " hidden=...,layers=...,heads=...,ffn=...,vocab=..."
        )
        super().__init__(f"{where}: {said}; {advice}")


_RUN = "`erg flops MODEL --engine counted` runs it, where transformers is installed"
_LIVE = "a Meter counts the live model as it runs: pass it as model="
# Families of transformers that people ask for and no reader is for: why, and what to do instead.
NOT_READ = {
    **dict.fromkeys(
        ("zamba", "zamba2"),
        ("its attention layers share one block's weights, each with adapters of its own", _RUN),
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
        ("a learned index picks the keys that each query meets", _RUN),
    ),
    **dict.fromkeys(
        ("rwkv", "xlstm", "reformer", "xlnet", "deberta"),
        ("its layers are of a kind that no reader is for", _RUN),
    ),
    "mllama": ("some of its layers attend to images", _LIVE),
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"),
        ("it is several models that hear, think and speak", _LIVE),
    ),
    **dict.fromkeys(
        ("wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "hubert", "wavlm", "seamless_m4t"),
        ("it reads sound, at several rates", _LIVE),
    ),
    **dict.fromkeys(
        ("resnet", "convnext", "convnextv2", "efficientnet", "mobilevit", "swin", "swinv2", "beit",
         "segformer", "timm_wrapper", "detr", "sam", "sam2", "blip", "blip-2"),
        ("it reads images, by other layers than a ViT's", _LIVE),
    ),
}  # fmt: skip


def model_graph(
    config: ModelConfig, *, image_size: ImageSize | None = None, architecture: str | None = None
) -> Graph:
    """The graph of the model that a configuration describes. FormatError for an unknown family.

    `architecture` is the model's class, which says what head it has: the first of the
    configuration's own `architectures`, if not given.

    `image_size`, height and width in pixels, is for vision towers that take an image as it is; one
    that resizes every image to the same size knows it itself.
    """
    kind = config.model_type
    if image_size is not None:
        _check_size(config, image_size)
    listed = config.names("architectures")
    name = architecture or (listed[0] if listed else None)
    if kind in DECODERS:
        graph = decoder_graph(DECODERS[kind](config))
    elif kind in ENCODERS:
        graph = encoder_graph(ENCODERS[kind](config))
    elif kind in SEQ2SEQ:
        graph = seq2seq_graph(SEQ2SEQ[kind](config))
    elif kind in VISION:
        graph = seeing_graph(VISION[kind](config, image_size))
    elif kind in LANGUAGE_ALONE:
        graph = language_alone(config)
    elif kind in IMAGES:
        graph = IMAGES[kind](config, image_size, name or "")
    else:
        raise _unknown(config)
    if kind not in IMAGES:
        graph = with_head(graph, config, name)
    return replace(
        graph,
        assumptions=(*graph.assumptions, *config.assumptions),
        facts=graph.facts | _learned_positions(graph, config),
        traits=traits(config),
    )


def _learned_positions(graph: Graph, config: ModelConfig) -> dict[str, int]:
    """How long a sequence can be, where positions are looked up in a table."""
    if not any(node.role == "positions" and node.stream == "tokens" for node in graph):
        return {}
    found = config.maybe(
        "n_positions", "max_position_embeddings", "max_target_positions", "max_seq_len"
    )
    if found is None:
        return {}
    return {"learned_positions": found - _NEVER_USED if graph.family in _PADDED else found}


# Their positions begin after that of padding, and the field counts the rows of the table.
_PADDED = ("roberta", "xlm-roberta", "camembert", "mpnet", "esm", "data2vec-text")
_NEVER_USED = 2


def known_families() -> list[str]:
    """Every `model_type` that can be read."""
    return sorted((*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION, *IMAGES, *LANGUAGE_ALONE))


def _check_size(config: ModelConfig, image_size: ImageSize) -> None:
    if config.model_type not in (*VISION, *IMAGES):
        raise UsageError(f"{config.where}: this model sees no images; leave the image size out")
    if any(isinstance(length, bool) or length < 1 for length in image_size):
        raise UsageError(f"an image size is a height and a width in pixels; got {image_size!r}")


def _unknown(config: ModelConfig) -> FormatError:
    kind = config.model_type
    if not kind:
        return FormatError(
            f"{config.where}: the field model_type is missing; add it (llama, qwen3, ...)"
        )
    if kind in NOT_READ:
        reason, instead = NOT_READ[kind]
        return UnknownArchitectureError(
            config.where, f"{kind} can't be counted from its configuration: {reason}",
            instead=instead,
        )  # fmt: skip
    close = get_close_matches(kind, known_families(), n=1, cutoff=0.8)
    hint = f" (is it {close[0]}?)" if close else ""
    return UnknownArchitectureError(config.where, f"the architecture {kind!r} is not known{hint}")

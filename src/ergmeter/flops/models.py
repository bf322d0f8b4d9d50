"""From a configuration to the graph of its model, whatever its family."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.berts import ENCODERS
from ergmeter.flops.decoder import decoder_graph
from ergmeter.flops.encoders import encoder_graph
from ergmeter.flops.families import DECODERS
from ergmeter.flops.heads import with_head
from ergmeter.flops.seeing import VISION
from ergmeter.flops.seq2seq import SEQ2SEQ, seq2seq_graph
from ergmeter.flops.vision import seeing_graph
from ergmeter.flops.written import traits

if TYPE_CHECKING:
    from ergmeter.flops.config import Config
    from ergmeter.flops.graph import Graph
    from ergmeter.flops.towers import ImageSize


def model_graph(
    config: Config, *, image_size: ImageSize | None = None, architecture: str | None = None
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
    if kind in DECODERS:
        graph = decoder_graph(DECODERS[kind](config))
    elif kind in ENCODERS:
        graph = encoder_graph(ENCODERS[kind](config))
    elif kind in SEQ2SEQ:
        graph = seq2seq_graph(SEQ2SEQ[kind](config))
    elif kind in VISION:
        graph = seeing_graph(VISION[kind](config, image_size))
    else:
        raise FormatError(_unknown(config))
    listed = config.names("architectures")
    graph = with_head(graph, config, architecture or (listed[0] if listed else None))
    assumptions = (*graph.assumptions, *config.assumed)
    return replace(graph, assumptions=assumptions, traits=traits(config))


def known_families() -> list[str]:
    """Every `model_type` that can be read."""
    return sorted((*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION))


def _check_size(config: Config, image_size: ImageSize) -> None:
    if config.model_type not in VISION:
        raise UsageError(f"{config.where}: this model sees no images; leave the image size out")
    if any(isinstance(length, bool) or length < 1 for length in image_size):
        raise UsageError(f"an image size is a height and a width in pixels; got {image_size!r}")


def _unknown(config: Config) -> str:
    kind = config.model_type
    if not kind:
        return f"{config.where}: the field model_type is missing; add it (llama, qwen3, ...)"
    close = get_close_matches(kind, known_families(), n=1, cutoff=0.8)
    hint = f" (is it {close[0]}?)" if close else ""
    return (
        f"{config.where}: the architecture {kind!r} is not known{hint};"
        " count it with --engine counted, which runs the model itself"
    )

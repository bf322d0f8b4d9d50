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


class UnknownArchitectureError(FormatError):
    """A `model_type` that no reader is for; `said` is that alone, without what to do."""

    def __init__(self, where: str, said: str) -> None:
        self.said = said
        super().__init__(
            f"{where}: {said}; if its layers are like a known family's, put that in model_type"
            " (llama, qwen3, mixtral, gpt2, ...), or pass its dimensions:"
            " hidden=...,layers=...,heads=...,ffn=...,vocab=..."
        )


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
        raise _unknown(config)
    listed = config.names("architectures")
    graph = with_head(graph, config, architecture or (listed[0] if listed else None))
    return replace(
        graph,
        assumptions=(*graph.assumptions, *config.assumed),
        facts=graph.facts | _learned_positions(graph, config),
        traits=traits(config),
    )


def _learned_positions(graph: Graph, config: Config) -> dict[str, int]:
    """How long a sequence can be, where positions are looked up in a table."""
    if not any(node.role == "positions" and node.stream == "tokens" for node in graph):
        return {}
    found = config.maybe(
        "n_positions", "max_position_embeddings", "max_target_positions", "max_seq_len"
    )
    if found is None:
        return {}
    return {"learned_positions": found - _NEVER_USED if graph.family in _PADDED else found}


# RoBERTa's positions begin after that of padding, and its field counts the rows of the table.
_PADDED = ("roberta", "xlm-roberta", "camembert")
_NEVER_USED = 2


def known_families() -> list[str]:
    """Every `model_type` that can be read."""
    return sorted((*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION))


def _check_size(config: Config, image_size: ImageSize) -> None:
    if config.model_type not in VISION:
        raise UsageError(f"{config.where}: this model sees no images; leave the image size out")
    if any(isinstance(length, bool) or length < 1 for length in image_size):
        raise UsageError(f"an image size is a height and a width in pixels; got {image_size!r}")


def _unknown(config: Config) -> FormatError:
    kind = config.model_type
    if not kind:
        return FormatError(
            f"{config.where}: the field model_type is missing; add it (llama, qwen3, ...)"
        )
    close = get_close_matches(kind, known_families(), n=1, cutoff=0.8)
    hint = f" (is it {close[0]}?)" if close else ""
    return UnknownArchitectureError(config.where, f"the architecture {kind!r} is not known{hint}")

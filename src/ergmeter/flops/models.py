"""From a configuration to the graph of its model, whatever its family."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError
from ergmeter.flops.decoder import decoder_graph
from ergmeter.flops.families import DECODERS

if TYPE_CHECKING:
    from ergmeter.flops.config import Config
    from ergmeter.flops.graph import Graph


def model_graph(config: Config) -> Graph:
    """The graph of the model that a configuration describes. FormatError for an unknown family."""
    kind = config.model_type
    if kind in DECODERS:
        graph = decoder_graph(DECODERS[kind](config))
    else:
        raise FormatError(_unknown(config))
    return replace(graph, assumptions=(*graph.assumptions, *config.assumed))


def known_families() -> list[str]:
    """Every `model_type` that can be read."""
    return sorted(DECODERS)


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

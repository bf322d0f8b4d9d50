"""The options of `erg analyze`: the original's flags, and what it has no flag for."""

from __future__ import annotations

from typing import Any

import click

from ergmeter.cli.options.pages import with_page

FORMATS = ("text", "json", "md")

_INPUTS = [
    click.option("--config", metavar="YAML", help="The training's YAML. Needed."),
    click.option("--model-config", metavar="JSON", help="The model's config.json. Needed."),
    click.option(
        "--compile-dir",
        metavar="DIR",
        help="Neuron compile cache, or a part of it.  [default: /home/ubuntu/neuron_cache]",
    ),
    click.option("--log-file", metavar="LOG", help="The training's log, for its throughput."),
    click.option("--batch-size", type=int, help="Global batch size, over the YAML's."),
    click.option("--seq-len", type=int, help="Tokens of a sequence, over the YAML's."),
    click.option("--throughput", type=float, help="Sequences per second, over the log's."),
    click.option("--num-nodes", type=int, help="Over trainer.num_nodes; 1 if neither is given."),
    click.option("--devices", type=int, help="Devices of a node, over trainer.devices."),
    click.option(
        "--lnc",
        type=click.Choice(["1", "2"]),
        help="Physical cores in a device.  [default: 2 on trn2 and trn3, else 1]",
    ),
    click.option("--dtype", help="What products are computed in, over precision.type."),
    click.option(
        "--hw-backend",
        type=click.Choice(["trn1", "trn2", "trn3", "inf2"]),
        default="trn1",
        show_default=True,
        help="The family of instances.",
    ),
    click.option(
        "--convention",
        help="Whose count of FLOPs; `neuron` is the original's, `erg conventions` explains them."
        "  [default: exact]",
    ),
]
_CHOICE = [
    click.option("--compiler-version", multiple=True, help="Only its graphs. May be repeated."),
    click.option("--module", multiple=True, help="Only this MODULE_... May be repeated."),
    click.option("--since", help="Only graphs written since that time."),
    click.option("--until", help="Only graphs written until that time."),
    click.option("--modules-from-log", is_flag=True, help="Only modules that the log names."),
    click.option(
        "--graph-runs", metavar="FILE", help="How often each graph ran: lines `MODULE_... 1234`."
    ),
    click.option("--processes", type=click.IntRange(min=1), help="For counting graphs."),
]
_SCORE = [
    click.option("--calculate-score", is_flag=True, help="The training score, with its factors."),
    click.option("--per-file-scores", is_flag=True, help="A score for each graph."),
    click.option(
        "--base-mfu", type=float, default=50.0, show_default=True, help="Baseline MFU in percent."
    ),
    click.option(
        "--base-throughput",
        type=float,
        default=100.0,
        show_default=True,
        help="Baseline sequences/s.",
    ),
    click.option(
        "--loss-improvement",
        type=float,
        default=1.0,
        show_default=True,
        help="Baseline loss / achieved loss.",
    ),
    click.option(
        "--convergence-rate",
        type=float,
        default=1.0,
        show_default=True,
        help="Baseline steps / achieved steps.",
    ),
    click.option(
        "--score-offset",
        type=click.Choice(["1", "0.1"]),
        default="1",
        show_default=True,
        help="The score's NKI factor is this plus the ratio; 0.1 since 2025-06-26.",
    ),
]
_OUTPUT: list[Any] = [
    click.option(
        "--output",
        metavar="JSON",
        help="Where to write.  [default: training_metrics.json; to stdout alone: nowhere]",
    ),
    click.option("--detailed", is_flag=True, help="Graphs one by one in the JSON."),
    click.option("--print-per-file", is_flag=True, help="Graphs one by one on the console."),
    with_page,
    click.option(
        "--format",
        "form",
        type=click.Choice(FORMATS),
        default="text",
        show_default=True,
        help="What stdout gets; json and md: that and nothing else.",
    ),
    click.option("--json", "as_json", is_flag=True, help="The same as --format json."),
    click.option(
        "--compat", is_flag=True, help="The original's numbers of 2025-06-12, faults included."
    ),
    click.option(
        "--compare", is_flag=True, help="Compare earlier outputs: --compare A.json B.json"
    ),
]


def with_options(function: Any) -> Any:  # noqa: ANN401  click's decorators are untyped functions
    """Every option of the command, in the order of its help."""
    for option in reversed([*_INPUTS, *_CHOICE, *_SCORE, *_OUTPUT]):
        function = option(function)
    return function

"""`erg flops`: what one step of a model costs, by part and under every convention."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.work_options import (
    CONTEXT,
    CONVENTION,
    PHASE,
    batch_of,
    graph_of,
    positive,
    with_batch,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.work import Training


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@with_batch
@PHASE
@CONTEXT
@click.option(
    "--dtype", help="Of weights and cache, for the bytes inference moves. Not given: 2 B."
)
@CONVENTION
@click.option(
    "--engine",
    type=click.Choice(["analytic", "counted"]),
    default="analytic",
    show_default=True,
    help="counted: build the model without its weights and run it; needs torch and transformers.",
)
@click.option("--params", type=float, callback=positive, help="Take this as N in formulas of N.")
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON, in FLOPs and bytes.")
def command(
    model: str,
    shape: dict[str, Any],
    training: Callable[[], Training],
    phase: str,
    context: int | None,
    dtype: str | None,
    convention: str,
    engine: str,
    params: float | None,
    as_json: bool,
) -> None:
    """Count the FLOPs of one step of a model.

    MODEL_CONFIG is a Hugging Face config.json, a directory with one, or a few dimensions:
    hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256. No weights are needed.
    """
    from rich.console import Console

    from ergmeter.errors import UsageError
    from ergmeter.flops.traffic import bytes_of
    from ergmeter.flops.work import step_work
    from ergmeter.records import dtype_named
    from ergmeter.views import flops as view

    if engine == "counted":
        _count(model, shape, training(), phase=phase, as_json=as_json)
        return
    if phase != "train" and training().checkpointing != "none":
        raise UsageError("checkpointing is for training; leave it out of inference")
    graph = graph_of(model, shape)
    batch = batch_of(graph, shape, phase=phase, context=context)
    work = step_work(
        graph,
        batch,
        phase=phase,
        training=training(),
        chosen=convention,
        params=int(params) if params else None,
        bytes_per_weight=bytes_of(dtype_named(dtype)),
    )
    if as_json:
        click.echo(json.dumps(view.document(work), indent=1, allow_nan=False))
        return
    console = Console()
    for line in view.lines(work):
        console.print(line)
    console.print(view.parts_table(work, tokens=batch.tokens_real))
    console.print(view.conventions_table(work))


def _count(
    model: str, shape: dict[str, Any], training: Training, *, phase: str, as_json: bool
) -> None:
    """Count by running the model, and say where the analytic engine differs."""
    from rich.console import Console

    from ergmeter.errors import FormatError, PluginError, UsageError
    from ergmeter.flops.source import read_model
    from ergmeter.views import counted as view

    if training.lora or training.frozen or phase == "decode" or shape["lengths"]:
        raise UsageError(
            "the counted engine runs whole sequences of the whole model: leave out --lora,"
            " --freeze, --lengths and decode, or use the analytic engine"
        )
    if shape["seq_len"] is None:
        raise UsageError("how long is a sequence? pass --seq-len")
    try:
        from ergmeter.flops.architectures import count_config
    except ImportError as error:
        raise PluginError(
            f"the counted engine needs torch and transformers ({error}): pip install torch"
            " transformers"
        ) from error
    config = read_model(model)
    counted = count_config(
        config.fields,
        batch_size=shape["batch_size"],
        seq_len=shape["seq_len"],
        source_len=shape["source_len"],
        train=phase == "train",
        checkpointing=training.checkpointing == "full",
    )
    try:
        agreed = view.agreed(config, counted, shape, training, phase=phase)
    except FormatError as error:
        agreed = str(error)
    if as_json:
        click.echo(json.dumps(view.document(counted, agreed), indent=1, allow_nan=False))
        return
    console = Console()
    for table in view.tables(counted):
        console.print(table)
    for line in view.lines(counted, agreed):
        console.print(line)

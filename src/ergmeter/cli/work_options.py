"""Options that describe one step: the model, the batch, what is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import COUNT, repeated, with_default, with_each
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.work import TrainedParts, Work


def positive(_context: object, option: click.Parameter, value: float | None) -> float | None:
    """Return a number that is above 0 and finite; else raise BadParameter."""
    if value is not None and not 0 < value < float("inf"):
        raise click.BadParameter(f"must be a number above 0; got {value:g}", param=option)
    return value


_BATCH = [
    click.option("--seq-len", type=COUNT, help="Tokens of a sequence."),
    with_default("--batch-size", type=COUNT, default=1, help="Sequences of a step."),
    click.option(
        "--lengths",
        metavar="N,N,...",
        help="Lengths of the documents packed or padded into those sequences.",
    ),
    click.option("--source-len", type=COUNT, help="Tokens an encoder reads, per sequence."),
    click.option(
        "--images",
        type=click.IntRange(min=0),
        default=0,
        help="Images of a step; their tokens are part of --seq-len.",
    ),
    click.option(
        "--image-size",
        metavar="HEIGHTxWIDTH",
        help="Of each image, in pixels, for models that take any size.",
    ),
    click.option(
        "--mtp",
        type=click.IntRange(min=0, max=100),
        help="Layers that predict further tokens (DeepSeek-V3 has 1), where they are trained.",
    ),
]
_TRAINING = [
    click.option(
        "--lora",
        metavar="r=16,targets=q_proj,v_proj",
        help="Train adapters only (targets=all-linear; add ,dora for DoRA).",
    ),
    repeated(
        "--freeze",
        metavar="NAME",
        help="Modules that are not trained: embed_tokens, layers.0, ... May be repeated.",
    ),
    click.option(
        "--checkpointing",
        type=click.Choice(["none", "selective", "full"]),
        help="Recompute activations of attention (selective) or of whole layers (full).  [default:"
        " none, assumed]",
    ),
]
PHASE = with_default(
    "--phase",
    type=click.Choice(["train", "prefill", "decode"]),
    default="train",
    help="A training step, reading a prompt, or making one token a sequence.",
)
CONTEXT = click.option(
    "--context",
    type=click.IntRange(min=0),
    help="Positions cached before the step. For decode: --seq-len, if not given.",
)
CONVENTION = with_default(
    "--convention",
    default="exact",
    help="Main convention of counting FLOPs; `erg conventions` explains them.",
)


WEIGHTS_DTYPE = click.option(
    "--weights-dtype",
    help="Type of stored weights, for the bytes that inference moves: bf16, fp8, int8, nf4, int4,"
    " mxfp4, ... [default: as the config says]",
)
CACHE_DTYPE = click.option(
    "--cache-dtype",
    help="Type of the cached keys and values: bf16, fp8, int8, ... [default: as the model]",
)
PARAMS = click.option(
    "--params", type=float, callback=positive, help="Parameters N in formulas that use N."
)
DEVICE = click.option("--device", help="Driver's name or alias; `erg peaks` lists them.")
with_batch = with_each(*_BATCH, *_TRAINING)
STEP = [*_BATCH, *_TRAINING, PHASE, CONTEXT, CONVENTION, WEIGHTS_DTYPE, CACHE_DTYPE]
OF_A_STEP = (
    *("seq_len", "batch_size", "lengths", "source_len", "images", "image_size", "mtp"),
    *("lora", "freeze", "checkpointing", "phase", "context", "convention"),
    *("weights_dtype", "cache_dtype"),
)


def work_of(model: str, options: dict[str, Any]) -> Work:
    """Count the step that the options describe."""
    from ergmeter.flops.estimate.storage import ASSUMED, storage_of
    from ergmeter.flops.source import read_model
    from ergmeter.flops.work import step_work

    training, phase, params = training_of(options), options["phase"], options.get("params")
    weights, cache = options["weights_dtype"], options["cache_dtype"]
    if phase != "train" and training.checkpointing != "none":
        raise UsageError("checkpointing is for training; leave it out of inference")
    if phase == "train" and (weights or cache):
        name = "--weights-dtype" if weights else "--cache-dtype"
        raise UsageError(f"{name} is for the bytes that inference moves; leave it out of training")
    graph = graph_of(model, options)
    storage = ASSUMED
    if phase != "train":
        storage = storage_of(read_model(model), weights=weights, cache=cache)
    return step_work(
        graph,
        batch_of(graph, options, phase=phase, context=options["context"]),
        phase=phase,
        training=training,
        chosen=options["convention"],
        params=int(params) if params else None,
        storage=storage,
    )


def training_of(options: dict[str, Any]) -> TrainedParts:
    """Return which parts the options train and recompute."""
    from ergmeter.flops.graph.adapters import Lora
    from ergmeter.flops.work import TrainedParts

    lora, checkpointing = options["lora"], options["checkpointing"]
    return TrainedParts(
        lora=Lora.parse(lora) if lora else None,
        frozen=options["freeze"],
        checkpointing=checkpointing or "none",
        is_checkpointing_assumed=checkpointing is None,
    )


def batch_of(
    graph: Graph, options: dict[str, Any], *, phase: str = "train", context: int | None = None
) -> Batch:
    """The batch that the options describe."""
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.work import writes

    seq_len = options["seq_len"]
    if seq_len is None and "image_is_sequence" in graph.facts:
        seq_len = graph.facts["tokens_per_image"]
    if seq_len is None and not (phase == "decode" and context):
        raise UsageError("how long is a sequence? pass --seq-len")
    if context and phase == "train":
        raise UsageError("--context is for a cache, and training has none; leave it out")
    if options["lengths"] is not None and (context or phase == "decode"):
        raise UsageError("--lengths are for whole sequences; leave them out with a cached context")
    _check_streams(graph, options)
    if phase == "decode":
        context, seq_len = context if context is not None else seq_len, 1
    return Batch.of(
        options["batch_size"],
        seq_len,
        lengths=lengths_of(options),
        past=context or 0,
        source_len=options["source_len"],
        images=options["images"],
        last_logits=phase == "prefill" and writes(graph),
        facts=graph.facts,
    )


def lengths_of(options: dict[str, Any]) -> list[int] | None:
    """The lengths of the documents, where they are given."""
    lengths = options["lengths"]
    if lengths is None:
        return None
    try:
        return [int(word) for word in lengths.split(",")]
    except ValueError:
        raise UsageError(
            f"--lengths takes whole numbers separated by commas; got {lengths!r}"
        ) from None


def _check_streams(graph: Graph, options: dict[str, Any]) -> None:
    """Refuse options that the model has no use for; require those that it needs."""
    streams = {node.stream for node in graph}
    if options["images"] and "tokens_per_image" not in graph.facts:
        raise UsageError("this model sees no images; leave out --images")
    if options["source_len"] and "source" not in streams:
        raise UsageError("this model has no encoder; leave out --source-len")
    if "source" in streams and not (options["source_len"] or graph.facts.get("source_len")):
        raise UsageError("how much does the encoder read? pass --source-len")


def graph_of(model: str, options: dict[str, Any]) -> Graph:
    """Return the graph of the named model, for images of the size in the options."""
    from ergmeter.flops.source import read_graph

    size = options["image_size"]
    if size is None:
        return read_graph(model, further=options["mtp"])
    height, _, width = size.lower().partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise UsageError(f"--image-size takes HEIGHTxWIDTH in pixels, as 448x448; got {size!r}")
    return read_graph(model, image_size=(int(height), int(width)), further=options["mtp"])

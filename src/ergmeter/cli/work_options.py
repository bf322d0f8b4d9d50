"""Options that say what one step is: the model, the batch, what is trained."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.batch import Batch
    from ergmeter.flops.graph import Graph
    from ergmeter.flops.work import Training
    from ergmeter.records import Flops

_SEQ_LEN = click.option("--seq-len", type=click.IntRange(min=1), help="Tokens of a sequence.")
_BATCH_SIZE = click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Sequences of a step.",
)
_LENGTHS = click.option(
    "--lengths",
    metavar="N,N,...",
    help="Lengths of the documents packed or padded into those sequences.",
)
_BATCH = [
    _SEQ_LEN,
    _BATCH_SIZE,
    _LENGTHS,
    click.option(
        "--source-len", type=click.IntRange(min=1), help="Tokens an encoder reads, per sequence."
    ),
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
        help="Adapters alone are trained (targets=all-linear; add ,dora for DoRA).",
    ),
    click.option(
        "--freeze",
        multiple=True,
        metavar="NAME",
        help="Modules that are not trained: embed_tokens, layers.0, ... May be repeated.",
    ),
    click.option(
        "--checkpointing",
        type=click.Choice(["none", "selective", "full"]),
        default="none",
        show_default=True,
        help="Activations computed again: those of attention, or of whole layers.",
    ),
]
PHASE = click.option(
    "--phase",
    type=click.Choice(["train", "prefill", "decode"]),
    default="train",
    show_default=True,
    help="A training step, reading a prompt, or making one token a sequence.",
)
CONTEXT = click.option(
    "--context",
    type=click.IntRange(min=0),
    help="Positions cached before the step. For decode: --seq-len, if not given.",
)
CONVENTION = click.option(
    "--convention",
    default="exact",
    show_default=True,
    help="Whose count of FLOPs to lead with; `erg conventions` explains them.",
)


def with_batch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options; the command gets `batch` (a function of the context) and `training`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        own = ("seq_len", "batch_size", "lengths", "source_len", "images", "image_size", "mtp")
        shape = {name: given.pop(name) for name in own}
        how = {name: given.pop(name) for name in ("lora", "freeze", "checkpointing")}
        return function(shape=shape, training=functools.partial(_training, **how), **given)

    for option in reversed([*_BATCH, *_TRAINING]):
        wrapped = option(wrapped)
    return wrapped


def with_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that give a run its FLOPs; the command gets them as `flops`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        shape = ("model_config", "seq_len", "batch_size", "phase")
        names = (*shape, "lora", "freeze", "checkpointing", "convention")
        said = {name: given.pop(name) for name in names}
        return function(flops=_flops(**said), **given)

    model = click.option(
        "--model-config",
        metavar="PATH",
        help="The model's config.json, for MFU; with --seq-len.",
    )
    for option in reversed([model, _SEQ_LEN, _BATCH_SIZE, *_TRAINING, PHASE, CONVENTION]):
        wrapped = option(wrapped)
    return wrapped


def _flops(
    *,
    model_config: str | None,
    seq_len: int | None,
    batch_size: int,
    convention: str,
    phase: str,
    **how: Any,  # noqa: ANN401  what `_training` takes
) -> tuple[Flops, ...]:
    from ergmeter.errors import UsageError

    if model_config is None:
        return ()
    if seq_len is None:
        raise UsageError("--model-config needs --seq-len: attention costs by the pair of tokens")
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.source import read_graph
    from ergmeter.flops.work import step_work

    graph = read_graph(model_config)
    if phase == "decode":  # one position for each sequence, after that many
        batch = Batch.of(batch_size, 1, past=seq_len, facts=graph.facts)
    else:
        batch = Batch.of(batch_size, seq_len, facts=graph.facts)
    work = step_work(
        graph,
        batch,
        phase=phase,
        training=_training(**how),
        chosen=convention,
    )
    return tuple(work.flops.values())


def _training(*, lora: str | None, freeze: tuple[str, ...], checkpointing: str) -> Training:
    from ergmeter.flops.adapters import Lora
    from ergmeter.flops.work import Training

    return Training(
        lora=Lora.parse(lora) if lora else None,
        frozen=freeze,
        checkpointing=checkpointing,  # type: ignore[arg-type]  # click has checked it
    )


def batch_of(
    graph: Graph, shape: dict[str, Any], *, phase: str = "train", context: int | None = None
) -> Batch:
    """The batch that the options describe."""
    from ergmeter.errors import UsageError
    from ergmeter.flops.batch import Batch

    seq_len = shape["seq_len"]
    if seq_len is None and not (phase == "decode" and context):
        raise UsageError("how long is a sequence? pass --seq-len")
    if context and phase == "train":
        raise UsageError("--context is a cache's, and training has none; leave it out")
    if shape["lengths"] is not None and (context or phase == "decode"):
        raise UsageError("--lengths are of whole sequences; leave them out with a cached context")
    _check_streams(graph, shape)
    if phase == "decode":
        context, seq_len = context if context is not None else seq_len, 1
    lengths = None
    if shape["lengths"] is not None:
        try:
            lengths = [int(word) for word in shape["lengths"].split(",")]
        except ValueError:
            raise UsageError(
                f"--lengths takes whole numbers with commas between; got {shape['lengths']!r}"
            ) from None
    return Batch.of(
        shape["batch_size"],
        seq_len,
        lengths=lengths,
        past=context or 0,
        source_len=shape["source_len"],
        images=shape["images"],
        facts=graph.facts,
    )


def _check_streams(graph: Graph, shape: dict[str, Any]) -> None:
    """Refuse what the model has no use for, and ask for what it can't do without."""
    from ergmeter.errors import UsageError

    streams = {node.stream for node in graph}
    if shape["images"] and "tokens_per_image" not in graph.facts:
        raise UsageError("this model sees no images; leave out --images")
    if shape["source_len"] and "source" not in streams:
        raise UsageError("this model has no encoder; leave out --source-len")
    if "source" in streams and not (shape["source_len"] or graph.facts.get("source_len")):
        raise UsageError("how much does the encoder read? pass --source-len")


def positive(_context: object, option: click.Parameter, value: float | None) -> float | None:
    """Check a number that must be above 0: nan and infinity are none."""
    if value is not None and not 0 < value < float("inf"):
        raise click.BadParameter(f"must be a number above 0; got {value:g}", param=option)
    return value


def graph_of(model: str, shape: dict[str, Any]) -> Graph:
    """The model that the command names, for images of the size that the options give."""
    from ergmeter.errors import UsageError
    from ergmeter.flops.source import read_graph

    said = shape["image_size"]
    if said is None:
        return read_graph(model, further=shape["mtp"])
    height, _, width = said.lower().partition("x")
    if not (height.isdigit() and width.isdigit()):
        raise UsageError(f"--image-size takes HEIGHTxWIDTH in pixels, as 448x448; got {said!r}")
    return read_graph(model, image_size=(int(height), int(width)), further=shape["mtp"])

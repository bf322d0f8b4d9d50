"""`erg estimate`: before anything runs, does it fit, how long does it take, what does it cost."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ergmeter.cli import work_options as step
from ergmeter.cli.options import Forms, flag, with_default, with_each, with_forms
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.estimate import estimate as engine
from ergmeter.flops.estimate.arrangement import (
    Kernels,
    Parallel,
    Setup,
    check_model_split,
    precision,
    stored_as,
)
from ergmeter.flops.estimate.memory import step_memory
from ergmeter.flops.estimate.storage import storage_of
from ergmeter.flops.source import read_model
from ergmeter.flops.work import TrainedParts, step_work
from ergmeter.hardware.grid import with_grid
from ergmeter.hardware.table import DeviceSpec, candidates, parse_peak
from ergmeter.records import Missing
from ergmeter.units import scaled

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.batch import Batch
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.metrics.definitions.peaks import Peak

_POSITIVE = click.IntRange(min=1, max=10**7)  # of devices and of parts of a step


def _choice(name: str, choices: tuple[str, ...], text: str) -> Callable[..., Any]:
    """An option with the first of these choices as its default."""
    kind = click.Choice(choices)
    return with_default(name, type=kind, default=choices[0], help=text)


_MEMORY = [
    _choice(
        "--dtype",
        ("bf16", "fp16", "fp32", "mixed", "bf16-master"),
        "Of weights; mixed: 32-bit weights under autocast; bf16-master: a 32-bit copy beside.",
    ),
    with_default(
        "--optimizer",
        default="adamw-fused",
        help="adamw-fused, adamw (foreach), adamw-loop, adamw-32bit, adamw-8bit, paged-adamw,"
        " paged-adamw-8bit, adafactor, muon, lion, sgd, sgd-momentum.",
    ),
    click.option(
        "--quantize",
        type=click.Choice(["nf4", "nf4-double", "int8"]),
        help="The frozen matrices, with --lora.",
    ),
    with_default(
        "--micro-batches",
        type=_POSITIVE,
        default=1,
        help="Parts that a device's share of a step is computed in (gradient accumulation).",
    ),
    _choice(
        "--attention",
        ("sdpa", "flash", "eager"),
        "torch's, flash attention, or written out with its probabilities kept.",
    ),
    _choice("--loss", ("logits", "fused"), "From whole logits, or fused with the head."),
    _choice(
        "--output",
        ("freed", "until-step", "until-next"),
        "How long the program holds the logits: not in the backward pass, until the"
        " optimizer's step, or until the next forward pass (`output = model(...)` in a loop).",
    ),
    flag("--kv-cache", help="The forward pass fills a cache of keys and values (use_cache=True)."),
    flag("--fused", help="Norms and activations in kernels of their own."),
    _choice("--adapter-dtype", ("fp32", "bf16"), "Of LoRA's matrices; PEFT makes them fp32."),
    flag("--lora-dropout", help="Adapters have dropout."),
]
_DEVICES = [
    step.DEVICE,
    click.option(
        "--num-devices", type=_POSITIVE, help="How many. [default: what the sizes below need]"
    ),
    click.option("--data-parallel", type=_POSITIVE, help="[default: the devices that are left]"),
    with_default("--tensor-parallel", type=_POSITIVE, default=1),
    with_default("--pipeline-parallel", type=_POSITIVE, default=1),
    with_default("--context-parallel", type=_POSITIVE, default=1),
    flag("--sequence-parallel", help="Norms split over tensor parallel too."),
    with_default(
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        help="ZeRO's stage: optimizer, gradients, weights sharded. FSDP is 3.",
    ),
    click.option("--memory-gib", type=float, help="Of one device, instead of the table's."),
    with_default("--usable", type=float, default=0.9, help="Share of it to plan with."),
]
_PLAN = [
    click.option("--tokens", type=float, help="To train on, as in 1e9."),
    click.option("--mfu", type=float, help="The utilisation to expect, as in 0.4."),
    click.option("--mfu-from", metavar="RUN", help="The utilisation of an earlier run, instead."),
    click.option("--peak", help="Dense peak of one device, instead of the table's: 989.5T."),
    click.option("--peak-source", help="Where that peak is from."),
    click.option("--watts", type=float, help="Average power of one device."),
    click.option("--power-frac", type=float, help="The same, as a share of its TDP: 0.8."),
    click.option(
        "--grid", metavar="NAME", help="Country or region, as `erg grid` lists them: FR, CAMX."
    ),
    click.option("--grid-g-per-kwh", type=float, help="Of the electricity, instead of --grid."),
    click.option("--grid-source", help="Where that intensity is from."),
    click.option("--pue", type=float, help="Of the building."),
    click.option("--pue-source", help="Where that PUE is from."),
    click.option("--price-per-hour", "--price-per-gpu-hour", type=float, help="Of one device."),
    click.option("--currency", default="price units", help="What that price is in."),
]


_SERVING = [
    flag(
        "--inference",
        help="To serve, not to train: weights, and a cache for --batch-size x --seq-len.",
    ),
    step.WEIGHTS_DTYPE,
    step.CACHE_DTYPE,
]


_TAKEN_BY_SERVING = {
    *("model", "seq_len", "batch_size", "source_len", "images", "image_size", "mtp"),
    *("device", "num_devices", "data_parallel", "tensor_parallel", "pipeline_parallel"),
    *("memory_gib", "usable", "inference", "weights_dtype", "cache_dtype"),
    *("as_json", "as_markdown", "page"),
}


def check_serving(context: click.Context) -> None:
    """Refuse what was given and serving makes no use of: else it would pass for counted."""
    for option in context.command.params:
        name = option.name or ""
        if name in _TAKEN_BY_SERVING or (
            context.get_parameter_source(name) is ParameterSource.DEFAULT
        ):
            continue
        instead = "say --weights-dtype" if name in ("dtype", "quantize") else "leave it out"
        raise UsageError(f"{option.opts[0]} is not for --inference; {instead}")


def with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add all of them to a command."""
    return with_each(function, [*_MEMORY, *_DEVICES, *_PLAN, *_SERVING])


_MOST_TOKENS = 10**15  # of a step; more is a slip of the keyboard
# The type whose peak a precision is held against.
_COMPUTED_IN = {"mixed": "bf16", "bf16-master": "bf16"}


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@step.with_batch
@with_options
@with_forms
def command(
    model: str,
    forms: Forms,
    **options: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Estimate, before anything runs, whether a training fits and what it takes.

    MODEL_CONFIG as for `erg flops`; --batch-size is of a whole step, all devices. Memory follows
    from what autograd keeps; time needs --mfu, energy --watts or --power-frac, and so on: nothing
    is assumed in silence. With --inference: whether weights and caches fit, and how many sequences.

    erg estimate config.json --seq-len 4096 --batch-size 64 --device h100-sxm --num-devices 8
    --zero 3 --checkpointing full --tokens 1e9 --mfu 0.4
    """
    from ergmeter.views.calculate import estimate as view

    options = with_grid(options)
    if options["inference"]:
        check_serving(click.get_current_context())
    specs = _specs(options["device"])
    room = _room(options, specs)
    parallel = _parallel(options)
    if options["inference"]:
        table = view.serving_estimate(_served(model, options, parallel), room)
    else:
        table = _trained(model, options, parallel, specs, room)
    forms.show(view.document(table))


def _served(model: str, options: dict[str, Any], parallel: Parallel) -> dict[str, engine.Serving]:
    """Memory for serving, with the requested types and with others."""
    graph = step.graph_of(model, options)
    check_model_split(graph, parallel)
    batch, config = _batch(graph, options), read_model(model)
    weights, cache = options["weights_dtype"], options["cache_dtype"]
    types = {
        engine.AS_ASKED: (weights, cache),
        "--weights-dtype fp8": ("fp8", cache),
        "--weights-dtype int4": ("int4", cache),
        "--cache-dtype fp8": (weights, "fp8"),
    }
    return {
        name: engine.serving(graph, batch, storage_of(config, weights=first, cache=other), parallel)
        for name, (first, other) in types.items()
    }


def _trained(
    model: str,
    options: dict[str, Any],
    parallel: Parallel,
    specs: tuple[DeviceSpec, ...] | Missing,
    room: engine.Room | Missing,
) -> Any:  # noqa: ANN401  loading its class would load the view
    from ergmeter.views.calculate import estimate as view

    how = step.training_of(options)
    for name in ("weights_dtype", "cache_dtype"):
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for --inference; a training has --dtype and --quantize")
    graph = _graph(model, options, how)
    batch = _batch(graph, options)
    setup = _setup(options, parallel)
    memory = step_memory(graph, batch, training=how, setup=setup)
    job = engine.TrainingJob(graph, batch, how, setup)
    changes = engine.ways(job, None if isinstance(room, Missing) else room.usable_bytes)
    work = step_work(graph, batch, training=how)
    results = engine.memory_results(memory, room, changes[0].most, spread=job.spread)
    plan, peak = _plan(options, parallel, specs), _peak(options, specs)
    results |= engine.plan_results(work.chosen, plan, peak)
    return view.training_estimate(memory, room, results, changes, work)


def _graph(model: str, options: dict[str, Any], how: TrainedParts) -> Graph:
    """The model's graph; a quantised checkpoint is noted, since it is not what is counted."""
    graph = step.graph_of(model, options)
    config, name = read_model(model), "quantization_config"
    inner = config.raw("text_config")
    stored = stored_as(config.raw(name) or (isinstance(inner, dict) and inner.get(name)))
    if stored is None:
        return graph
    counted = f"weights counted at {precision(options['dtype']).weight} B; pass --quantize"
    if options["quantize"] is not None:
        counted = f"matrices counted as --quantize {options['quantize']} keeps them"
    elif how.lora is None:
        counted += " with --lora"
    line = f"{name} ({stored}) is not taken: {counted}"
    return replace(graph, assumptions=(*graph.assumptions, line))


def _batch(graph: Graph, options: dict[str, Any]) -> Batch:
    batch = step.batch_of(graph, options)
    if batch.tokens > _MOST_TOKENS:
        raise UsageError(
            f"a step of --batch-size x --seq-len is at most {_MOST_TOKENS:.0e} tokens; got"
            f" {batch.sequences} x {batch.seq_len}"
        )
    return batch


def _parallel(options: dict[str, Any]) -> Parallel:
    splits = {name: options[f"{name}_parallel"] for name in ("tensor", "pipeline", "context")}
    model = prod(splits.values())
    devices, data = options["num_devices"], options["data_parallel"]
    if data is None:
        if devices is not None and devices % model:
            raise UsageError(
                f"{devices} devices are no multiple of the {model} that tensor x pipeline x context"
                " parallelism takes"
            )
        data = (devices or model) // model
    if devices is not None and data * model != devices:
        raise UsageError(
            f"data x tensor x pipeline x context parallelism is {data * model} devices, and"
            f" --num-devices is {devices}"
        )
    zero, is_sequence_parallel = options["zero"], options["sequence_parallel"]
    return Parallel(data, **splits, zero=zero, is_sequence_parallel=is_sequence_parallel)


def _setup(options: dict[str, Any], parallel: Parallel) -> Setup:
    own: Any = "fused" if options["fused"] else "eager"
    kernels = Kernels(
        options["attention"],
        norm=own,
        feed=own,
        loss=options["loss"],
        adapter_bytes=4 if options["adapter_dtype"] == "fp32" else 2,
        has_adapter_dropout=options["lora_dropout"],
        has_cache=options["kv_cache"],
    )
    return Setup(
        options["dtype"],
        options["optimizer"],
        options["quantize"],
        kernels,
        options["micro_batches"],
        parallel,
        engine.CUBLAS_BYTES,
        options["output"],
    )


def _specs(device: str | None) -> tuple[DeviceSpec, ...] | Missing:
    """The rows that the device's name may mean; what all of them agree on is taken."""
    if device is None:
        return Missing("no device was given; `erg peaks` lists them")
    try:
        return candidates(device)
    except NotMeasurable as error:
        return Missing(str(error))


def _room(
    options: dict[str, Any], specs: tuple[DeviceSpec, ...] | Missing
) -> engine.Room | Missing:
    engine.check_stated("usable", options["usable"])  # whether or not there is something to use
    engine.check_stated("memory_gib", options["memory_gib"])
    if options["memory_gib"] is not None:
        return engine.Room(
            "the device", options["memory_gib"] * 2**30, "as given", options["usable"]
        )
    if isinstance(specs, Missing):
        return Missing(f"pass --device or --memory-gib ({specs.reason})")
    keys = ", ".join(spec.key for spec in specs)
    sizes = [spec.memory_there for spec in specs]
    if sizes[0] is None:
        return Missing(f"the table has no memory for {keys}: pass --memory-gib")
    if len({size and size[0] for size in sizes}) > 1:
        return Missing(
            f"{options['device']!r} is any of {keys}, and their memory differs: name one of them,"
            " or pass --memory-gib"
        )
    size, source = sizes[0]
    name = specs[0].name if len(specs) == 1 else f"any of {keys}"
    return engine.Room(name, size, f"{name}, {source}", options["usable"])


def _peak(options: dict[str, Any], specs: tuple[DeviceSpec, ...] | Missing) -> Peak | Missing:
    from ergmeter.metrics.definitions.peaks import declared_peak, device_peak

    dtype = _COMPUTED_IN.get(options["dtype"], options["dtype"])
    if options["peak"] is not None:
        peak = declared_peak(parse_peak(options["peak"]), dtype, options["peak_source"])
        return peak if isinstance(specs, Missing) else _instead(peak, specs)
    if options["device"] is None:
        return Missing("pass --device or --peak (no device was given; `erg peaks` lists them)")
    return device_peak(options["device"], dtype)


def _instead(peak: Peak, specs: tuple[DeviceSpec, ...]) -> Peak:
    """A peak given beside a device: the note says what is still taken of the device."""
    from ergmeter.metrics.definitions.peaks import agreed

    own = agreed(spec.peak_flops_per_s.get(peak.dtype) for spec in specs)
    instead_of = "" if own is None else f", not its {scaled(own, 'FLOP/s')}"
    name = ", ".join(spec.name for spec in specs)
    return replace(
        peak, source=f"{peak.source}; of {name} only memory and TDP are taken{instead_of}"
    )


def _plan(
    options: dict[str, Any], parallel: Parallel, specs: tuple[DeviceSpec, ...] | Missing
) -> engine.TrainingPlan:
    from ergmeter.metrics.definitions.peaks import agreed

    names = ("tokens", "mfu", "watts", "power_frac", "grid_g_per_kwh", "grid_source", "pue")
    stated = {name: options[name] for name in (*names, "pue_source", "price_per_hour", "currency")}
    tdp_w = None if isinstance(specs, Missing) else agreed(spec.tdp_w for spec in specs)
    if options["mfu_from"] is not None:
        stated["mfu"], stated["mfu_source"] = _measured_mfu(options["mfu_from"], stated["mfu"])
    return engine.TrainingPlan(parallel.devices, tdp_w=tdp_w, **stated)


def _measured_mfu(path: str, also_given: float | None) -> tuple[float, str]:
    """The MFU of a run, and what it was of."""
    from ergmeter.metrics.catalog import catalogue
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.reader import Run

    if also_given is not None:
        raise UsageError("give one of --mfu and --mfu-from, not both")
    run = Run.open(path)
    reading = summarize(run).readings["utilization.mfu_frac"]
    if isinstance(reading, Missing):
        raise NotMeasurable(f"the run {run.name} has no MFU: {reading.reason}")
    catalogue()["utilization.mfu_frac"].usable(reading)
    convention = run.flops[0].convention
    if convention != "exact":
        raise UsageError(
            f"the run {run.name} counts its MFU under {convention}, and the estimate under exact;"
            " pass --mfu"
        )
    of = reading.note.partition("; of ")[2].partition(";")[0]
    return (
        reading.value,
        f"of the run {run.name}, there of {of}: another device may get another share",
    )

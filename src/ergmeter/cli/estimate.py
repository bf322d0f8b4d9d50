"""`erg estimate`: before anything runs, does it fit, how long does it take, what does it cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.work_options import batch_of, graph_of, with_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.arrangement import Parallel, Setup
    from ergmeter.flops.batch import Batch
    from ergmeter.flops.estimate import Room
    from ergmeter.flops.graph import Graph
    from ergmeter.flops.work import Training
    from ergmeter.hardware import DeviceSpec
    from ergmeter.metrics.compute import Peak
    from ergmeter.records import Missing

_ONE = click.IntRange(min=1, max=10**7)  # of devices and of parts of a step
_MOST_TOKENS = 10**15  # of a step; more is a slip of the keyboard
_DTYPES = ("bf16", "fp16", "fp32", "mixed", "bf16-master")
# The type whose peak a precision is held against.
_COMPUTED_IN = {"mixed": "bf16", "bf16-master": "bf16"}

_MEMORY = [
    click.option(
        "--dtype",
        type=click.Choice(_DTYPES),
        default="bf16",
        show_default=True,
        help="Of weights; mixed: 32-bit weights under autocast; bf16-master: a 32-bit copy beside.",
    ),
    click.option("--optimizer", default="adamw", show_default=True, help="adamw, adamw-8bit, ..."),
    click.option(
        "--quantize",
        type=click.Choice(["nf4", "nf4-double", "int8"]),
        help="The frozen matrices, with --lora.",
    ),
    click.option(
        "--micro-batches",
        type=_ONE,
        default=1,
        show_default=True,
        help="Parts that a device's share of a step is computed in (gradient accumulation).",
    ),
    click.option(
        "--attention",
        type=click.Choice(["flash", "eager"]),
        default="flash",
        show_default=True,
        help="One kernel, or written out with its probabilities kept.",
    ),
    click.option(
        "--loss",
        type=click.Choice(["logits", "fused"]),
        default="logits",
        show_default=True,
        help="From whole logits, or fused with the head.",
    ),
    click.option("--fused", is_flag=True, help="Norms and activations in kernels of their own."),
    click.option(
        "--adapter-dtype",
        type=click.Choice(["fp32", "bf16"]),
        default="fp32",
        show_default=True,
        help="Of LoRA's matrices; PEFT makes them fp32.",
    ),
    click.option("--lora-dropout", is_flag=True, help="Adapters have dropout."),
]
_DEVICES = [
    click.option("--device", help="By its driver's name or an alias; `erg peaks` lists them."),
    click.option("--num-devices", type=_ONE, help="How many. [default: what the sizes below need]"),
    click.option("--data-parallel", type=_ONE, help="[default: the devices that are left]"),
    click.option("--tensor-parallel", type=_ONE, default=1, show_default=True),
    click.option("--pipeline-parallel", type=_ONE, default=1, show_default=True),
    click.option("--context-parallel", type=_ONE, default=1, show_default=True),
    click.option("--sequence-parallel", is_flag=True, help="Norms split over tensor parallel too."),
    click.option(
        "--zero",
        type=click.IntRange(0, 3),
        default=0,
        show_default=True,
        help="ZeRO's stage: optimizer, gradients, weights sharded. FSDP is 3.",
    ),
    click.option("--memory-gib", type=float, help="Of one device, instead of the table's."),
    click.option(
        "--usable", type=float, default=0.9, show_default=True, help="Share of it to plan with."
    ),
]
_PLAN = [
    click.option("--tokens", type=float, help="To train on, as in 1e9."),
    click.option("--mfu", type=float, help="The utilisation to expect, as in 0.4."),
    click.option("--mfu-from", metavar="RUN", help="The utilisation of an earlier run, instead."),
    click.option("--peak", help="Dense peak of one device, instead of the table's: 989.5T."),
    click.option("--peak-source", help="Where that peak is from."),
    click.option("--watts", type=float, help="Average power of one device."),
    click.option("--power-frac", type=float, help="The same, as a share of its TDP: 0.8."),
    click.option("--grid-g-per-kwh", type=float, help="Of the electricity."),
    click.option("--grid-source", help="Where that intensity is from."),
    click.option("--pue", type=float, help="Of the building."),
    click.option("--pue-source", help="Where that PUE is from."),
    click.option("--price-per-hour", type=float, help="Of one device."),
    click.option("--currency", default="price units", help="What that price is in."),
]


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed([*_MEMORY, *_DEVICES, *_PLAN]):
        function = option(function)
    return function


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@with_batch
@_with_options
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON, in base units.")
def command(
    model: str,
    shape: dict[str, Any],
    training: Callable[[], Training],
    as_json: bool,
    **given: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Estimate, before anything runs, whether a training fits and what it takes.

    MODEL_CONFIG as for `erg flops`; --batch-size is of a whole step, all devices. Memory follows
    from what autograd keeps; time needs --mfu, energy --watts or --power-frac, and so on: nothing
    is assumed in silence.

    erg estimate config.json --seq-len 4096 --batch-size 64 --device h100-sxm --num-devices 8
    --zero 3 --checkpointing full --tokens 1e9 --mfu 0.4
    """
    from ergmeter.flops.estimate import memory_results, plan_results, verdict
    from ergmeter.flops.memory import step_memory
    from ergmeter.flops.work import step_work
    from ergmeter.records import Missing
    from ergmeter.views import estimate as view

    how = training()
    graph = _graph(model, shape, given, has_adapters=how.lora is not None)
    batch = _batch(graph, shape)
    parallel = _parallel(given)
    spec = _spec(given["device"])
    setup = _setup(given, parallel)
    room = _room(given, spec)
    usable = None if isinstance(room, Missing) else room.usable_bytes
    modes = _modes(graph, batch, how, setup, usable)
    memory = step_memory(graph, batch, training=how, setup=setup)
    work = step_work(graph, batch, training=how)
    shown = view.Shown(
        memory,
        verdict(memory, room),
        memory_results(memory, room, modes[how.checkpointing][1])
        | plan_results(work.chosen, _plan(given, parallel, spec), _peak(given, spec)),
        modes,
        how.checkpointing,
        has_room=usable is not None,
    )
    if as_json:
        click.echo(json.dumps(view.document(shown), indent=1, allow_nan=False))
        return
    _print(shown)


def _print(shown: Any) -> None:  # noqa: ANN401  loading its class would load the view
    from rich.console import Console

    from ergmeter.views import estimate as view

    console = Console(highlight=False)
    console.print(view.moments_table(shown.memory))
    console.print(shown.verdict, style="bold", markup=False)
    console.print(view.checkpointing_table(shown))
    for line in view.lines(shown):
        console.print(line)


def _graph(
    model: str, shape: dict[str, Any], given: dict[str, Any], *, has_adapters: bool
) -> Graph:
    """The model; how its checkpoint is quantised is said, since it is not what is counted."""
    from dataclasses import replace

    from ergmeter.flops.arrangement import precision
    from ergmeter.flops.source import read_model
    from ergmeter.flops.states import stored_as

    graph = graph_of(model, shape)
    config, name = read_model(model), "quantization_config"
    inner = config.raw("text_config")
    stored = stored_as(config.raw(name) or (isinstance(inner, dict) and inner.get(name)))
    if stored is None:
        return graph
    counted = f"weights counted at {precision(given['dtype']).weight} B; pass --quantize"
    if given["quantize"] is not None:
        counted = f"matrices counted as --quantize {given['quantize']} keeps them"
    elif not has_adapters:
        counted += " with --lora"
    line = f"{name} ({stored}) is not taken: {counted}"
    return replace(graph, assumptions=(*graph.assumptions, line))


def _batch(graph: Graph, shape: dict[str, Any]) -> Batch:
    from ergmeter.errors import UsageError

    batch = batch_of(graph, shape)
    if batch.tokens > _MOST_TOKENS:
        raise UsageError(
            f"a step of --batch-size x --seq-len is at most {_MOST_TOKENS:.0e} tokens; got"
            f" {batch.sequences} x {batch.seq_len}"
        )
    return batch


def _parallel(given: dict[str, Any]) -> Parallel:
    from ergmeter.errors import UsageError
    from ergmeter.flops.arrangement import Parallel

    model = given["tensor_parallel"] * given["pipeline_parallel"] * given["context_parallel"]
    devices, data = given["num_devices"], given["data_parallel"]
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
    return Parallel(
        data,
        given["tensor_parallel"],
        given["pipeline_parallel"],
        given["context_parallel"],
        given["zero"],
        given["sequence_parallel"],
    )


def _setup(given: dict[str, Any], parallel: Parallel) -> Setup:
    from ergmeter.flops.arrangement import Kernels, Setup
    from ergmeter.flops.estimate import CUBLAS_BYTES

    own = "fused" if given["fused"] else "eager"
    kernels = Kernels(
        given["attention"],
        own,  # type: ignore[arg-type]
        own,  # type: ignore[arg-type]
        given["loss"],
        adapter_bytes=4 if given["adapter_dtype"] == "fp32" else 2,
        has_adapter_dropout=given["lora_dropout"],
    )
    return Setup(
        given["dtype"],
        given["optimizer"],
        given["quantize"],
        kernels,
        given["micro_batches"],
        parallel,
        CUBLAS_BYTES,
    )


def _spec(device: str | None) -> DeviceSpec | Missing:
    from ergmeter.errors import NotMeasurable
    from ergmeter.hardware import lookup
    from ergmeter.records import Missing

    if device is None:
        return Missing("no device was given: pass --device (`erg peaks` lists them)")
    try:
        return lookup(device)
    except NotMeasurable as error:
        return Missing(str(error))


def _room(given: dict[str, Any], spec: DeviceSpec | Missing) -> Room | Missing:
    from ergmeter.flops.estimate import Room, check_stated
    from ergmeter.records import Missing

    check_stated("usable", given["usable"])  # whether or not there is something to use
    check_stated("memory_gib", given["memory_gib"])
    if given["memory_gib"] is not None:
        return Room("the device", given["memory_gib"] * 2**30, "as given", given["usable"])
    if isinstance(spec, Missing):
        return spec
    if spec.memory_bytes is None:
        return Missing(f"the table has no memory for {spec.name}: pass --memory-gib")
    return Room(spec.name, spec.memory_bytes, f"{spec.name}, {spec.source}", given["usable"])


def _peak(given: dict[str, Any], spec: DeviceSpec | Missing) -> Peak | Missing:
    from ergmeter.errors import NotMeasurable
    from ergmeter.hardware import parse_peak
    from ergmeter.metrics.compute import declared_peak, table_peak
    from ergmeter.records import Missing

    dtype = _COMPUTED_IN.get(given["dtype"], given["dtype"])
    if given["peak"] is not None:
        peak = declared_peak(parse_peak(given["peak"]), dtype, given["peak_source"])
        return peak if isinstance(spec, Missing) else _instead(peak, spec)
    if isinstance(spec, Missing):
        return spec
    try:
        return table_peak(spec.key, dtype)
    except NotMeasurable as error:
        return Missing(str(error))


def _instead(peak: Peak, spec: DeviceSpec) -> Peak:
    """A peak given beside a device: the note says what is still taken of the device."""
    from dataclasses import replace

    from ergmeter.units import scaled

    own = spec.peak_flops_per_s.get(peak.dtype)
    known = "" if own is None else f", not its {scaled(own, 'FLOP/s')}"
    return replace(
        peak, source=f"{peak.source}; of {spec.name} only memory and TDP are taken{known}"
    )


def _plan(given: dict[str, Any], parallel: Parallel, spec: DeviceSpec | Missing) -> Any:  # noqa: ANN401  loading its class would load the engine
    from ergmeter.flops.estimate import Plan
    from ergmeter.records import Missing

    names = ("tokens", "mfu", "watts", "power_frac", "grid_g_per_kwh", "grid_source", "pue")
    stated = {name: given[name] for name in (*names, "pue_source", "price_per_hour", "currency")}
    tdp_w = None if isinstance(spec, Missing) else spec.tdp_w
    if given["mfu_from"] is not None:
        stated["mfu"], stated["mfu_source"] = _measured_mfu(given["mfu_from"], stated["mfu"])
    return Plan(parallel.devices, tdp_w=tdp_w, **stated)


def _measured_mfu(path: str, also_given: float | None) -> tuple[float, str]:
    """The MFU of a run, and what it was of."""
    from ergmeter.errors import NotMeasurable, UsageError
    from ergmeter.metrics.summarize import summarize
    from ergmeter.records import Missing
    from ergmeter.runlog.reader import Run

    if also_given is not None:
        raise UsageError("give one of --mfu and --mfu-from, not both")
    run = Run.open(path)
    found = summarize(run).readings["utilization.mfu_frac"]
    if isinstance(found, Missing):
        raise NotMeasurable(f"the run {run.name} has no MFU: {found.reason}")
    convention = run.flops[0].convention
    if convention != "exact":
        raise UsageError(
            f"the run {run.name} counts its MFU under {convention}, and the estimate under exact;"
            " pass --mfu"
        )
    of = found.note.partition("; of ")[2].partition(";")[0]
    return (
        found.value,
        f"of the run {run.name}, there of {of}: another device may get another share",
    )


def _modes(
    graph: Graph, batch: Batch, how: Training, setup: Setup, usable: float | None
) -> dict[str, tuple[float, int | None]]:
    """With each kind of checkpointing: the peak, and the largest batch where a device is known."""
    from dataclasses import replace

    from ergmeter.flops.estimate import largest_batch
    from ergmeter.flops.memory import step_memory

    found: dict[str, tuple[float, int | None]] = {}
    for mode in ("none", "selective", "full"):
        each = replace(how, checkpointing=mode)
        memory = step_memory(graph, batch, training=each, setup=setup)
        largest = None
        if usable is not None:
            largest = largest_batch(graph, batch, training=each, setup=setup, usable_bytes=usable)
        found[mode] = (memory.peak.total_bytes, largest)
    return found

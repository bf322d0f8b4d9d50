"""Estimates what the options of `erg estimate` describe.

Separate from the command, so that printing its help does not load the engine.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ergmeter.cli import work_options as step
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.estimate import estimate as engine
from ergmeter.flops.estimate.arrangement import Kernels, Parallel, Setup, check_model_split
from ergmeter.flops.estimate.memory import step_memory
from ergmeter.flops.estimate.storage import declared_method, storage_of
from ergmeter.flops.graph.graph import Graph
from ergmeter.flops.source import read_model
from ergmeter.flops.work import TrainedParts, step_work
from ergmeter.hardware.table import DeviceSpec, candidates, parse_peak
from ergmeter.metrics.definitions.peaks import Peak, agreed, declared_peak, device_peak
from ergmeter.records import Missing, or_missing
from ergmeter.units import scaled
from ergmeter.views.calculate import estimate as view
from ergmeter.views.document import Document

_MOST_TOKENS = 10**15  # of a step; more is a slip of the keyboard
# The type whose peak a precision is compared with.
_COMPUTED_IN = {"mixed": "bf16", "bf16-master": "bf16"}


def serving_document(model: str, options: dict[str, Any]) -> Document:
    """Estimate the memory to serve, with the requested types and with others."""
    room = _room(options, _specs(options["device"]))
    parallel = _parallel(options)
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
    servings = {
        name: engine.serving(graph, batch, storage_of(config, weights=first, cache=other), parallel)
        for name, (first, other) in types.items()
    }
    return view.serving_document(servings, room)


def training_document(model: str, options: dict[str, Any]) -> Document:
    """Estimate a training: memory, changes that make it fit, time, energy and cost."""
    specs = _specs(options["device"])
    room = _room(options, specs)
    parallel = _parallel(options)
    how = step.training_of(options)
    for name in ("weights_dtype", "cache_dtype"):
        if options[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for --inference; a training has --dtype and --quantize")
    setup = _setup(options, parallel)
    graph = _graph(model, options, how, setup)
    batch = _batch(graph, options)
    memory = step_memory(graph, batch, training=how, setup=setup)
    job = engine.TrainingJob(graph, batch, how, setup)
    changes = engine.ways(job, None if isinstance(room, Missing) else room.usable_bytes)
    work = step_work(graph, batch, training=how)
    results = engine.memory_results(memory, room, changes[0].most, spread=job.spread)
    plan, peak = _plan(options, parallel, specs), _peak(options, specs)
    results |= engine.plan_results(work.chosen, plan, peak)
    return view.training_document(memory, room, results, changes, work)


def _graph(model: str, options: dict[str, Any], how: TrainedParts, setup: Setup) -> Graph:
    """Return the model's graph; note a quantised checkpoint, whose types are not counted."""
    graph = step.graph_of(model, options)
    method = declared_method(read_model(model))
    if method is None:
        return graph
    counted = f"weights counted at {setup.precision.weight} B; pass --quantize"
    if setup.quantize is not None:
        counted = f"matrices counted as --quantize {setup.quantize} keeps them"
    elif how.lora is None:
        counted += " with --lora"
    line = f"quantization_config ({method}) is ignored: {counted}"
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
                f"{devices} devices are not a multiple of {model}, which tensor x pipeline x"
                " context parallelism needs"
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
        dtype=options["dtype"],
        optimizer=options["optimizer"],
        quantize=options["quantize"],
        micro_batches=options["micro_batches"],
        output=options["output"],
        kernels=kernels,
        parallel=parallel,
        workspace_bytes=engine.CUBLAS_BYTES,
    )


def _specs(device: str | None) -> tuple[DeviceSpec, ...] | Missing:
    """Return the table's rows that the device's name may mean."""
    if device is None:
        return Missing("no device was given; `erg peaks` lists them")
    return or_missing(candidates, device)


def _room(
    options: dict[str, Any], specs: tuple[DeviceSpec, ...] | Missing
) -> engine.Room | Missing:
    engine.check_stated("usable", options["usable"])  # also if the memory is unknown
    engine.check_stated("memory_gib", options["memory_gib"])
    if options["memory_gib"] is not None:
        return engine.Room(options["memory_gib"] * 2**30, "as given", options["usable"])
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
    return engine.Room(size, f"{name}, {source}", options["usable"])


def _peak(options: dict[str, Any], specs: tuple[DeviceSpec, ...] | Missing) -> Peak | Missing:
    dtype = _COMPUTED_IN.get(options["dtype"], options["dtype"])
    if options["peak"] is not None:
        peak = declared_peak(parse_peak(options["peak"]), dtype, options["peak_source"])
        return peak if isinstance(specs, Missing) else _instead(peak, specs)
    if options["device"] is None:
        return Missing("pass --device or --peak (no device was given; `erg peaks` lists them)")
    return device_peak(options["device"], dtype)


def _instead(peak: Peak, specs: tuple[DeviceSpec, ...]) -> Peak:
    """Return the given peak with a note that memory and TDP are still the device's."""
    own = agreed(spec.peak_flops_per_s.get(peak.dtype) for spec in specs)
    instead_of = "" if own is None else f", not its {scaled(own, 'FLOP/s')}"
    name = ", ".join(spec.name for spec in specs)
    return replace(
        peak, source=f"{peak.source}; of {name} only memory and TDP are taken{instead_of}"
    )


def _plan(
    options: dict[str, Any], parallel: Parallel, specs: tuple[DeviceSpec, ...] | Missing
) -> engine.TrainingPlan:
    names = ("tokens", "mfu", "watts", "power_frac", "grid_g_per_kwh", "grid_source", "pue")
    stated = {name: options[name] for name in (*names, "pue_source", "price_per_hour", "currency")}
    tdp_w = None if isinstance(specs, Missing) else agreed(spec.tdp_w for spec in specs)
    if options["mfu_from"] is not None:
        stated["mfu"], stated["mfu_source"] = _measured_mfu(options["mfu_from"], stated["mfu"])
    return engine.TrainingPlan(parallel.devices, tdp_w=tdp_w, **stated)


def _measured_mfu(path: str, also_given: float | None) -> tuple[float, str]:
    """Return the MFU of a run, and a note that names the run and its peak."""
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

"""`erg estimate`: before anything runs, does it fit, how long does it take, what does it cost."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options.estimate import check_serving, with_options
from ergmeter.cli.options.work import batch_of, graph_of, with_batch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.flops.batch import Batch
    from ergmeter.flops.estimate.arrangement import Parallel, Setup
    from ergmeter.flops.estimate.estimate import Room, Serving
    from ergmeter.flops.graph.graph import Graph
    from ergmeter.flops.work import TrainedParts
    from ergmeter.hardware import DeviceSpec
    from ergmeter.metrics.definitions.peaks import Peak
    from ergmeter.records import Missing

_MOST_TOKENS = 10**15  # of a step; more is a slip of the keyboard
# The type whose peak a precision is held against.
_COMPUTED_IN = {"mixed": "bf16", "bf16-master": "bf16"}


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@with_batch
@with_options
@click.option("--json", "as_json", is_flag=True, help="Everything, as JSON, in base units.")
def command(
    model: str,
    shape: dict[str, Any],
    training: Callable[[], TrainedParts],
    as_json: bool,
    **given: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Estimate, before anything runs, whether a training fits and what it takes.

    MODEL_CONFIG as for `erg flops`; --batch-size is of a whole step, all devices. Memory follows
    from what autograd keeps; time needs --mfu, energy --watts or --power-frac, and so on: nothing
    is assumed in silence. With --inference: whether weights and caches fit, and how many sequences.

    erg estimate config.json --seq-len 4096 --batch-size 64 --device h100-sxm --num-devices 8
    --zero 3 --checkpointing full --tokens 1e9 --mfu 0.4
    """
    from ergmeter.views.calculate import estimate as view

    if given["inference"]:
        check_serving(click.get_current_context())
    specs = _specs(given["device"])
    room = _room(given, specs)
    parallel = _parallel(given)
    if given["inference"]:
        shown = view.served(_served(model, shape, given, parallel), room)
    else:
        shown = _trained(model, shape, training(), given, parallel, specs, room)
    _show(shown, as_json=as_json)


def _show(shown: Any, *, as_json: bool) -> None:  # noqa: ANN401  loading its class would load the view
    from ergmeter.views.calculate import estimate as view

    if as_json:
        click.echo(json.dumps(view.document(shown), indent=1, allow_nan=False))
        return
    _print(shown)


def _served(
    model: str, shape: dict[str, Any], given: dict[str, Any], parallel: Parallel
) -> dict[str, Serving]:
    """What is held to serve, as asked and with other types."""
    from ergmeter.flops.estimate.arrangement import check_model_split
    from ergmeter.flops.estimate.estimate import AS_ASKED, serving
    from ergmeter.flops.estimate.storage import storage_of
    from ergmeter.flops.source import read_model

    graph = graph_of(model, shape)
    check_model_split(graph, parallel)
    batch, config = _batch(graph, shape), read_model(model)
    weights, cache = given["weights_dtype"], given["cache_dtype"]
    types = {
        AS_ASKED: (weights, cache),
        "--weights-dtype fp8": ("fp8", cache),
        "--weights-dtype int4": ("int4", cache),
        "--cache-dtype fp8": (weights, "fp8"),
    }
    return {
        name: serving(graph, batch, storage_of(config, weights=one, cache=other), parallel)
        for name, (one, other) in types.items()
    }


def _check_training(given: dict[str, Any]) -> None:
    from ergmeter.errors import UsageError

    for name in ("weights_dtype", "cache_dtype"):
        if given[name] is not None:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} is for --inference; a training has --dtype and --quantize")


def _trained(
    model: str,
    shape: dict[str, Any],
    how: TrainedParts,
    given: dict[str, Any],
    parallel: Parallel,
    specs: tuple[DeviceSpec, ...] | Missing,
    room: Room | Missing,
) -> Any:  # noqa: ANN401  loading its class would load the view
    from ergmeter.flops.estimate.estimate import TrainingJob, memory_results, plan_results, ways
    from ergmeter.flops.estimate.memory import step_memory
    from ergmeter.flops.work import step_work
    from ergmeter.records import Missing
    from ergmeter.views.calculate import estimate as view

    _check_training(given)
    graph = _graph(model, shape, given, has_adapters=how.lora is not None)
    batch = _batch(graph, shape)
    setup = _setup(given, parallel)
    memory = step_memory(graph, batch, training=how, setup=setup)
    job = TrainingJob(graph, batch, how, setup)
    changes = ways(job, None if isinstance(room, Missing) else room.usable_bytes)
    work = step_work(graph, batch, training=how)
    results = memory_results(memory, room, changes[0].most, spread=job.spread)
    results |= plan_results(work.chosen, _plan(given, parallel, specs), _peak(given, specs))
    return view.trained(memory, room, results, changes, work)


def _print(shown: Any) -> None:  # noqa: ANN401  loading its class would load the view
    from rich.console import Console

    from ergmeter.views.calculate import estimate as view

    console = Console(highlight=False)
    for part in view.parts(shown):
        console.print(part)


def _graph(
    model: str, shape: dict[str, Any], given: dict[str, Any], *, has_adapters: bool
) -> Graph:
    """The model; how its checkpoint is quantised is said, since it is not what is counted."""
    from dataclasses import replace

    from ergmeter.flops.estimate.arrangement import precision, stored_as
    from ergmeter.flops.source import read_model

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
    from ergmeter.flops.estimate.arrangement import Parallel

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
    from ergmeter.flops.estimate.arrangement import Kernels, Setup
    from ergmeter.flops.estimate.estimate import CUBLAS_BYTES

    own = "fused" if given["fused"] else "eager"
    kernels = Kernels(
        given["attention"],
        own,  # type: ignore[arg-type]
        own,  # type: ignore[arg-type]
        given["loss"],
        adapter_bytes=4 if given["adapter_dtype"] == "fp32" else 2,
        has_adapter_dropout=given["lora_dropout"],
        has_cache=given["kv_cache"],
    )
    return Setup(
        given["dtype"],
        given["optimizer"],
        given["quantize"],
        kernels,
        given["micro_batches"],
        parallel,
        CUBLAS_BYTES,
        given["output"],
    )


def _specs(device: str | None) -> tuple[DeviceSpec, ...] | Missing:
    """The rows that the device's name may mean; what all of them agree on is taken."""
    from ergmeter.errors import NotMeasurable
    from ergmeter.hardware import candidates
    from ergmeter.records import Missing

    if device is None:
        return Missing("no device was given; `erg peaks` lists them")
    try:
        return candidates(device)
    except NotMeasurable as error:
        return Missing(str(error))


def _room(given: dict[str, Any], specs: tuple[DeviceSpec, ...] | Missing) -> Room | Missing:
    from ergmeter.flops.estimate.estimate import Room, check_stated
    from ergmeter.records import Missing

    check_stated("usable", given["usable"])  # whether or not there is something to use
    check_stated("memory_gib", given["memory_gib"])
    if given["memory_gib"] is not None:
        return Room("the device", given["memory_gib"] * 2**30, "as given", given["usable"])
    if isinstance(specs, Missing):
        return Missing(f"pass --device or --memory-gib ({specs.reason})")
    keys = ", ".join(spec.key for spec in specs)
    found = [spec.memory_there for spec in specs]
    if found[0] is None:
        return Missing(f"the table has no memory for {keys}: pass --memory-gib")
    if len({one and one[0] for one in found}) > 1:
        return Missing(
            f"{given['device']!r} is any of {keys}, and their memory differs: name one of them, or"
            " pass --memory-gib"
        )
    size, said = found[0]
    name = specs[0].name if len(specs) == 1 else f"any of {keys}"
    return Room(name, size, f"{name}, {said}", given["usable"])


def _peak(given: dict[str, Any], specs: tuple[DeviceSpec, ...] | Missing) -> Peak | Missing:
    from ergmeter.hardware import parse_peak
    from ergmeter.metrics.definitions.peaks import declared_peak, device_peak
    from ergmeter.records import Missing

    dtype = _COMPUTED_IN.get(given["dtype"], given["dtype"])
    if given["peak"] is not None:
        peak = declared_peak(parse_peak(given["peak"]), dtype, given["peak_source"])
        return peak if isinstance(specs, Missing) else _instead(peak, specs)
    if given["device"] is None:
        return Missing("pass --device or --peak (no device was given; `erg peaks` lists them)")
    return device_peak(given["device"], dtype)


def _instead(peak: Peak, specs: tuple[DeviceSpec, ...]) -> Peak:
    """A peak given beside a device: the note says what is still taken of the device."""
    from dataclasses import replace

    from ergmeter.metrics.definitions.peaks import agreed
    from ergmeter.units import scaled

    own = agreed(spec.peak_flops_per_s.get(peak.dtype) for spec in specs)
    known = "" if own is None else f", not its {scaled(own, 'FLOP/s')}"
    name = ", ".join(spec.name for spec in specs)
    return replace(peak, source=f"{peak.source}; of {name} only memory and TDP are taken{known}")


def _plan(
    given: dict[str, Any], parallel: Parallel, specs: tuple[DeviceSpec, ...] | Missing
) -> Any:  # noqa: ANN401  loading its class would load the engine
    from ergmeter.flops.estimate.estimate import TrainingPlan
    from ergmeter.metrics.definitions.peaks import agreed
    from ergmeter.records import Missing

    names = ("tokens", "mfu", "watts", "power_frac", "grid_g_per_kwh", "grid_source", "pue")
    stated = {name: given[name] for name in (*names, "pue_source", "price_per_hour", "currency")}
    tdp_w = None if isinstance(specs, Missing) else agreed(spec.tdp_w for spec in specs)
    if given["mfu_from"] is not None:
        stated["mfu"], stated["mfu_source"] = _measured_mfu(given["mfu_from"], stated["mfu"])
    return TrainingPlan(parallel.devices, tdp_w=tdp_w, **stated)


def _measured_mfu(path: str, also_given: float | None) -> tuple[float, str]:
    """The MFU of a run, and what it was of."""
    from ergmeter.errors import NotMeasurable, UsageError
    from ergmeter.metrics.catalog import catalogue
    from ergmeter.metrics.summarize import summarize
    from ergmeter.records import Missing
    from ergmeter.runlog.reader import Run

    if also_given is not None:
        raise UsageError("give one of --mfu and --mfu-from, not both")
    run = Run.open(path)
    found = summarize(run).readings["utilization.mfu_frac"]
    if isinstance(found, Missing):
        raise NotMeasurable(f"the run {run.name} has no MFU: {found.reason}")
    catalogue()["utilization.mfu_frac"].usable(found)
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

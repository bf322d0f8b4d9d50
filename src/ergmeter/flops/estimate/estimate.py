"""Estimates before a run: whether it fits, what to change if not, time, energy, carbon and cost.

Every reading depends on the user's inputs (a utilisation, a power, a price), so its basis is
"assumed" and its note names them. No input has a default: without it the readings that need it are
missing, and the reason names the option to pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch, Sequences
from ergmeter.flops.estimate.arrangement import QUANTISED, Parallel, Setup
from ergmeter.flops.estimate.memory import KINDS, Memory, step_memory
from ergmeter.flops.estimate.storage import STORED_TYPES, Storage
from ergmeter.flops.graph.adapters import Lora
from ergmeter.flops.graph.graph import Attention, Convolution, Graph, Node, Scan
from ergmeter.flops.work import TrainedParts
from ergmeter.metrics.definitions.peaks import Peak
from ergmeter.records import Flops, Missing, Reading, Result
from ergmeter.units import duration, number_of, scaled, significant

# Changes that make a training fit.
#
# Checkpointing shrinks only activations, ZeRO only what is stored per parameter. Which of them
# helps depends on where the peak is, so each change is estimated like the plan itself.

AS_ASKED = "as asked"
# The search for the largest batch ends here, for models whose memory does not grow with the batch.
MOST_SEQUENCES = 2**40
_MOST_DEVICES = 2**14
_FELT = 0.995  # a change is listed if the peak falls below this share of the peak before
_ZERO = "--zero "
_LORA = Lora(16, ("all-linear",))
_LORA_SAID = "--lora r=16,targets=all-linear"


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training whose memory is estimated: model, batch, trained parts and setup."""

    graph: Graph
    batch: Batch
    training: TrainedParts
    setup: Setup

    def peak_bytes(self) -> float:
        """Return the peak memory of the device that needs the most."""
        memory = step_memory(self.graph, self.batch, training=self.training, setup=self.setup)
        return memory.peak.total_bytes

    def of(self, sequences: int) -> TrainingJob:
        """Return the job with `sequences` sequences in a step."""
        return replace(self, batch=_resized(self.batch, sequences))

    def with_setup(self, **changes: Any) -> TrainingJob:  # noqa: ANN401  fields of a Setup
        """Return the job with some fields of its setup changed."""
        return replace(self, setup=replace(self.setup, **changes))

    @property
    def spread(self) -> int:
        """Micro-batches of a step on all data-parallel devices together."""
        return self.setup.parallel.data * self.setup.micro_batches

    def on(self, data: int, zero: int) -> TrainingJob:
        """Return the job on `data` data-parallel devices, its batch rounded up to fit them."""
        job = self.with_setup(parallel=replace(self.setup.parallel, data=data, zero=zero))
        return job.of(-(-self.batch.sequences // job.spread) * job.spread)


@dataclass(frozen=True, slots=True)
class Way:
    """A change of the plan, its peak memory, and the most sequences that then fit."""

    name: str
    peak_bytes: float
    most: int | None = None  # None: not even one, or the device's memory is unknown
    fits: bool | None = None


def ways(job: TrainingJob, usable_bytes: float | None) -> list[Way]:
    """Return the plan, then single changes that need less memory; if none fits, combinations."""
    tried = [_tried(AS_ASKED, job, usable_bytes)]
    for name, each in _changes(job):
        way = _tried(name, each, usable_bytes)
        if way.peak_bytes < _FELT * _to_beat(way, tried):
            tried.append(way)
    if usable_bytes is None or any(way.fits for way in tried):
        return tried
    for name, each in _together(job):
        way = _tried(name, each, usable_bytes)
        if way.peak_bytes < _FELT * min(before.peak_bytes for before in tried):
            tried.append(way)
        if way.fits:
            break
    spread = _spread(job, usable_bytes)
    return [*tried, *([spread] if spread else [])]


def _to_beat(way: Way, tried: list[Way]) -> float:
    """Return the peak to compare `way` with: the plan's; for ZeRO, that of the last listed stage.

    A lower stage of ZeRO needs less traffic, so a higher one must save memory over it.
    """
    like = [each for each in tried if each.name.startswith(_ZERO) and way.name.startswith(_ZERO)]
    return (like or tried[:1])[-1].peak_bytes


def _tried(name: str, job: TrainingJob, usable_bytes: float | None) -> Way:
    peak = job.peak_bytes()
    if usable_bytes is None:
        return Way(name, peak)
    return Way(name, peak, micro_batch_max(job, usable_bytes), peak <= usable_bytes)


def _changes(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Yield the job with one option changed, and that option."""
    how, setup = job.training, job.setup
    yield from _checkpointed(job)
    if setup.kernels.loss == "logits":
        yield "--loss fused", job.with_setup(kernels=replace(setup.kernels, loss="fused"))
    if setup.output != "freed":
        yield "--output freed", job.with_setup(output="freed")
    if setup.optimizer in ("adamw", "adamw-loop"):
        yield "--optimizer adamw-fused", job.with_setup(optimizer="adamw-fused")
    is_full = how.lora is None and not how.frozen and how.trains is None
    if setup.optimizer.startswith("adamw") and setup.optimizer != "adamw-8bit" and is_full:
        yield "--optimizer adamw-8bit", job.with_setup(optimizer="adamw-8bit")
    if setup.parallel.data > 1:
        for stage in range(setup.parallel.zero + 1, 4):
            parallel = replace(setup.parallel, zero=stage)
            yield f"{_ZERO}{stage}", job.with_setup(parallel=parallel)
    if is_full:
        yield from _adapted(job)
    elif how.lora is not None and setup.quantize is None:
        yield "--quantize nf4", job.with_setup(quantize="nf4")
    each = job.batch.sequences // setup.parallel.data
    if each > setup.micro_batches:
        yield f"--micro-batches {each}", job.with_setup(micro_batches=each)


def _checkpointed(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    for mode in ("selective", "full"):
        if mode != job.training.checkpointing and job.training.checkpointing != "full":
            how = replace(job.training, checkpointing=mode)
            yield f"--checkpointing {mode}", replace(job, training=how)


def _adapted(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Yield the job with LoRA instead of full training, if the model has modules for it."""
    adapted = replace(job, training=replace(job.training, lora=_LORA))
    try:
        adapted.peak_bytes()
    except UsageError:
        return
    yield _LORA_SAID, adapted
    yield f"{_LORA_SAID} --quantize nf4", adapted.with_setup(quantize="nf4")


def _together(job: TrainingJob) -> Iterator[tuple[str, TrainingJob]]:
    """Yield combinations of changes: each adds one change to the combination before it."""
    names: list[str] = []
    wanted = ("--zero 3", "--checkpointing full", "--loss fused", "--micro-batches")
    for start in wanted:
        for name, each in _changes(job):
            if name.startswith(start):
                names, job = [*names, name], each
                if len(names) > 1:
                    yield " ".join(names), job
                break


def _spread(job: TrainingJob, usable_bytes: float) -> Way | None:
    """Return the change to FSDP with full checkpointing, devices doubled until it fits; or None."""
    data = 2 * job.setup.parallel.data
    job = replace(job, training=replace(job.training, checkpointing="full"))
    while data * job.setup.parallel.tensor <= _MOST_DEVICES:
        each = job.on(data, 3)
        if each.peak_bytes() <= usable_bytes:
            options = f"--num-devices {each.setup.parallel.devices} --zero 3 --checkpointing full"
            if each.batch.sequences != job.batch.sequences:
                options += f" --batch-size {each.batch.sequences}"
            return _tried(options, each, usable_bytes)
        data *= 2
    return None


def micro_batch_max(job: TrainingJob, usable_bytes: float) -> int | None:
    """Return the most sequences per device and micro-batch that fit; None if not even one does.

    Memory that does not grow with the batch fits at any size: the search ends at MOST_SEQUENCES.
    """

    def peak_bytes(each: int) -> float:
        return job.of(each * job.spread).peak_bytes()

    low, low_bytes = 1, peak_bytes(1)
    if low_bytes > usable_bytes:
        return None
    high, high_bytes = 2, peak_bytes(2)
    while high_bytes <= usable_bytes:
        if high >= MOST_SEQUENCES:
            return MOST_SEQUENCES
        # Memory grows almost linearly: extrapolate.
        grown = (usable_bytes - high_bytes) * (high - low) / max(high_bytes - low_bytes, 1.0)
        low, low_bytes = high, high_bytes
        high = min(high + max(1, round(min(grown, MOST_SEQUENCES))) + 1, MOST_SEQUENCES)
        high_bytes = peak_bytes(high)
    sizes = range(low + 1, high)
    return low + bisect_left(sizes, True, key=lambda each: peak_bytes(each) > usable_bytes)


def _resized(batch: Batch, sequences: int) -> Batch:
    """Return the batch with another number of sequences; other streams grow in proportion."""

    def scaled_count(each: Sequences) -> Sequences:
        return replace(each, count=-(-each.count * sequences // batch.sequences))

    others = {
        name: tuple(map(scaled_count, sequences_of)) for name, sequences_of in batch.others.items()
    }
    return Batch(sequences, batch.seq_len, (Sequences(batch.seq_len, sequences),), others)


# Memory of serving: stored weights, and a KV cache for every running sequence.
#
# The weights of Llama 3.1 8B in bf16 are 16 GB; the cache of 32 sequences of 32768 tokens is 137
# GB. Bytes per position follow from the attention: grouped heads, a window, a compressed cache or a
# state that does not grow.


@dataclass(frozen=True, slots=True)
class Serving:
    """Bytes of weights and KV cache on one device; activations are not included."""

    weights_bytes: float
    cache_bytes: float  # of one sequence
    sequences: int  # of the batch, on one device
    context: int
    copies: int  # data-parallel copies of the model
    assumptions: tuple[str, ...]

    @property
    def total_bytes(self) -> float:
        """Weights and the caches of `sequences` sequences."""
        return self.weights_bytes + self.sequences * self.cache_bytes

    def sequences_max(self, usable_bytes: float) -> int | None:
        """Return the most sequences that fit on all devices at a time.

        None if the weights alone do not fit, or if a sequence needs no cache.
        """
        spare = usable_bytes - self.weights_bytes
        if spare < 0:
            return None
        return int(spare // self.cache_bytes) * self.copies if self.cache_bytes else None


def serving(graph: Graph, batch: Batch, storage: Storage, parallel: Parallel) -> Serving:
    """Return the memory of one device that serves its share of a model and of the caches."""
    if batch.sequences % parallel.data:
        raise UsageError(
            f"--batch-size {batch.sequences} must be a multiple of the {parallel.data} model copies"
        )
    share = parallel.tensor * parallel.pipeline
    each = storage.cache.bits / 8
    cache = sum(
        cached_numbers(node, batch) * each / (_split(node, parallel) * parallel.pipeline)
        for node in graph
    )
    weights = storage.total_bytes(graph) / share
    assumptions = [
        *graph.assumptions,
        *storage.notes,
        f"a cache of {scaled(cache, 'B')} a device for each sequence of {batch.seq_len} tokens",
        "activations of a forward pass, and a server's reserve for them, are not included",
    ]
    if (more := _experts_left_alone(graph, storage)) > 0:
        assumptions.append(
            f"experts are counted in {storage.matrices.name} too; bitsandbytes does not quantise"
            " experts that transformers 5 stores as one tensor: with it, weights are"
            f" {scaled(weights + more / share, 'B')} a device"
        )
    if share > 1:
        assumptions.append(
            "weights are split evenly, the cache by key-value heads; a latent cache is not split"
        )
    sequences = batch.sequences // parallel.data
    return Serving(weights, cache, sequences, batch.seq_len, parallel.data, tuple(assumptions))


def _experts_left_alone(graph: Graph, storage: Storage) -> float:
    """Return the bytes that weights grow by if bitsandbytes does not quantise the experts."""
    if storage.matrices not in [STORED_TYPES[name] for name in QUANTISED]:
        return 0
    return sum(
        node.params * storage.rest.bits / 8 - storage.held_bytes(node)
        for node, work in graph.linears()
        if node.part == "experts" and not work.is_module
    )


def _split(node: Node, parallel: Parallel) -> int:
    """Return the number of tensor-parallel devices that share a node's cache; others copy it."""
    work = node.work
    if not isinstance(work, Attention):
        return parallel.tensor
    return 1 if work.latent else min(parallel.tensor, work.kv_heads)


def cached_numbers(node: Node, batch: Batch) -> float:
    """Return the elements that a node caches for one sequence of the batch's full length."""
    work = node.work
    if isinstance(work, Attention) and work.keys is not None:
        return work.cached * batch.source_length(work.keys)
    if isinstance(work, Attention) and work.mask == "causal":
        limit = work.window or work.chunk or batch.seq_len
        return work.cached * min(batch.seq_len, limit)
    return work.state if isinstance(work, Scan | Convolution) else 0


# Memory, time, energy, carbon and cost as readings.

# Fragmentation took 8 to 15 % of the allocator's reserved memory in four recorded runs on an H200,
# so a plan must not use all of it.
USABLE_FRAC = 0.9
# torch gives cuBLAS a workspace for each thread that multiplies, one forward and one backward:
# 32 MiB on Hopper and later, 8 MiB before.
CUBLAS_BYTES = 2 * 32 * 2**20
AS_GIVEN = "as given"

# The user's inputs: meaning with unit, and bounds. nan is outside all bounds. The bounds are far
# from real values; they keep the results finite.
_STATED: dict[str, tuple[str, float, float]] = {
    "memory_gib": ("the memory of one device in GiB, as in 80", 0, 1e6),
    "usable": ("the share of a device's memory to plan with, as in 0.9", 0, 1),
    "tokens": ("how many tokens to train on, as in 1e9", 0, 1e18),
    "mfu": ("the model-FLOPs utilisation, a share, as in 0.4", 1e-6, 1),
    "watts": ("the average power of one device in W, as in 550", 0, 1e5),
    "power_frac": ("a device's average power as a share of its TDP, as in 0.8", 0, 1.5),
    "grid_g_per_kwh": ("the grid's intensity in g of CO2e a kWh, as in 300", 0, 1e5),
    "pue": ("the building's energy over that of its machines, as in 1.2", 1, 100),
    "price_per_hour": ("the price of one device for an hour, as in 2.5", 0, 1e9),
}
_MAY_BE_LEAST = ("mfu", "grid_g_per_kwh", "pue")


def check_stated(name: str, value: float | None, where: str = "") -> None:
    """Raise UsageError if an input is out of bounds. `where`: its source, for the message."""
    if value is None:
        return
    what, least, most = _STATED[name]
    is_inclusive = name in _MAY_BE_LEAST
    if (least <= value if is_inclusive else least < value) and value <= most:
        return
    low = f"{least:g} or more" if is_inclusive else f"above {least:g}"
    raise UsageError(
        f"--{name.replace('_', '-')} is {what}: {low} and at most {most:g}; got {value:g}{where}"
    )


PEAK = "estimate.memory_peak_bytes"
SPARE = "estimate.memory_spare_bytes"
MICRO_BATCH_MAX = "estimate.micro_batch_max"
BATCH_MAX = "estimate.batch_size_max"
SEQUENCES_MAX = "estimate.sequences_max"
STEP = "estimate.step_s"
TOKENS_PER_S = "estimate.tokens_per_s"
DURATION = "estimate.duration_h"
ENERGY = "estimate.energy_kwh"
CARBON = "estimate.co2e_g"
COST = "estimate.cost"


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one device, and how much of it a plan may use."""

    memory_bytes: float
    source: str
    usable_frac: float = USABLE_FRAC

    def __post_init__(self) -> None:
        check_stated("usable", self.usable_frac)
        check_stated("memory_gib", self.memory_bytes / 2**30)

    @property
    def usable_bytes(self) -> float:
        """The memory that a plan may use."""
        return self.memory_bytes * self.usable_frac

    @property
    def text(self) -> str:
        """The usable memory, its share and its source as text."""
        return (
            f"{scaled(self.usable_bytes, 'B')}, {significant(100 * self.usable_frac)} % of"
            f" {scaled(self.memory_bytes, 'B')} ({self.source})"
        )


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The user's inputs for time, energy, carbon and cost of a training; None: not given."""

    devices: int = 1
    tokens: float | None = None
    mfu: float | None = None
    mfu_source: str = AS_GIVEN
    watts: float | None = None  # of one device, on average
    power_frac: float | None = None  # of its TDP, instead
    tdp_w: float | None = None
    grid_g_per_kwh: float | None = None
    grid_source: str | None = None
    pue: float | None = None
    pue_source: str | None = None
    price_per_hour: float | None = None  # of one device
    currency: str = "price units"

    def __post_init__(self) -> None:
        if self.watts is not None and self.power_frac is not None:
            raise UsageError("give the power as --watts or as --power-frac, not as both")
        check_stated("mfu", self.mfu, "" if self.mfu_source == AS_GIVEN else f", {self.mfu_source}")
        for name in ("tokens", "watts", "power_frac", "grid_g_per_kwh", "pue", "price_per_hour"):
            check_stated(name, getattr(self, name))


def _assumed(value: float, unit: str, note: str) -> Reading:
    """Return a reading with the basis "assumed"; `note` names the inputs that it depends on."""
    return Reading(value, unit, "assumed", note=note)


def memory_results(
    memory: Memory, room: Room | Missing, most: int | None, *, spread: int = 1
) -> dict[str, Result]:
    """Return the peak by kind of memory, what is left, and the largest batch.

    `most`: sequences per device that fit at a time; `spread`: micro-batches of a step, all devices.
    """
    peak = memory.peak
    per = f"one device, {memory.sequences} sequences at a time, at the {peak.name}"
    results: dict[str, Result] = {
        PEAK: _assumed(peak.total_bytes, "B", f"{per}; without fragmentation")
    }
    for kind in KINDS:
        if peak.bytes[kind]:
            key = f"estimate.memory_{kind.replace(' ', '_')}_bytes"
            results[key] = _assumed(peak.bytes[kind], "B", per)
    if isinstance(room, Missing):
        return results | dict.fromkeys((SPARE, MICRO_BATCH_MAX, BATCH_MAX), room)
    results[SPARE] = _assumed(room.usable_bytes - peak.total_bytes, "B", f"of {room.text}")
    if most is None:
        none = Missing(f"not even one sequence per device fits in {room.text}")
        return results | {MICRO_BATCH_MAX: none, BATCH_MAX: none}
    ended = ", or more: the search ends here" if most >= MOST_SEQUENCES else ""
    note = f"in {room.text}{ended}"
    return results | {
        MICRO_BATCH_MAX: _assumed(most, "sequences", f"on one device, {note}"),
        BATCH_MAX: _assumed(most * spread, "sequences", f"of a step, {note}"),
    }


def verdict(needs: float, room: Room | Missing) -> str:
    """Return one line: whether `needs` bytes fit on a device."""
    if isinstance(room, Missing):
        return f"needs {scaled(needs, 'B')} a device; whether it fits is unknown: {room.reason}"
    spare = room.usable_bytes - needs
    if spare >= 0:
        return f"fits with {scaled(spare, 'B')} to spare: needs {scaled(needs, 'B')} of {room.text}"
    return f"does not fit: needs {scaled(needs, 'B')}, has {room.text}"


def serving_results(needs: Serving, room: Room | Missing) -> dict[str, Result]:
    """Return the memory of serving by kind, and how many sequences fit at a time."""
    per = f"one device, {needs.sequences} sequences of {needs.context} tokens"
    results: dict[str, Result] = {
        PEAK: _assumed(needs.total_bytes, "B", f"{per}; without activations and fragmentation"),
        "estimate.memory_weights_bytes": _assumed(needs.weights_bytes, "B", per),
        "estimate.memory_cache_bytes": _assumed(needs.sequences * needs.cache_bytes, "B", per),
    }
    if isinstance(room, Missing):
        return results | {SPARE: room, SEQUENCES_MAX: room}
    results[SPARE] = _assumed(room.usable_bytes - needs.total_bytes, "B", f"of {room.text}")
    most = needs.sequences_max(room.usable_bytes)
    if most is None:
        why = (
            f"the weights alone need {scaled(needs.weights_bytes, 'B')}, more than {room.text}"
            if needs.weights_bytes > room.usable_bytes
            else "a sequence needs no cache, so memory does not limit their number"
        )
        return results | {SEQUENCES_MAX: Missing(why)}
    note = f"of {needs.context} tokens each, on all devices, in {room.text} a device"
    return results | {SEQUENCES_MAX: _assumed(most, "sequences", note)}


def plan_results(flops: Flops, plan: TrainingPlan, peak: Peak | Missing) -> dict[str, Result]:
    """Return time, energy, carbon and cost; each is missing if an input of it was not given."""
    step = _step(flops, plan, peak)
    if isinstance(step, Missing):
        return dict.fromkeys((STEP, TOKENS_PER_S, DURATION, ENERGY, CARBON, COST), step)
    tokens = flops.tokens_per_step or 1
    note = f"{tokens} tokens a step, in {duration(step.value)}"
    rate = _assumed(tokens / step.value, "tokens/s", note)
    results: dict[str, Result] = {STEP: step, TOKENS_PER_S: rate}
    if plan.tokens is None:
        reason = Missing("no number of tokens was given: pass --tokens")
        return results | dict.fromkeys((DURATION, ENERGY, CARBON, COST), reason)
    note = (
        f"{plan.tokens:g} tokens at {significant(rate.value)} tokens/s, without a pause for"
        " evaluation, checkpoints or failures"
    )
    hours = _assumed(plan.tokens / rate.value / 3600, "h", note)
    energy = _energy(hours, plan)
    return results | {
        DURATION: hours,
        ENERGY: energy,
        CARBON: _carbon(energy, plan),
        COST: _cost(hours, plan),
    }


def _step(flops: Flops, plan: TrainingPlan, peak: Peak | Missing) -> Reading | Missing:
    if plan.mfu is None:
        return Missing(
            "no utilisation was given: pass --mfu, as `erg mfu` or an earlier run reports it"
        )
    if isinstance(peak, Missing):
        return peak
    seconds = flops.model_per_step / (plan.mfu * plan.devices * peak.flops_per_s)
    note = (
        f"{scaled(flops.model_per_step, 'FLOP')} of the model ({flops.convention}) at MFU"
        f" {plan.mfu:g} ({plan.mfu_source}) on {plan.devices} x {peak.text}"
    )
    return _assumed(seconds, "s", note)


def _energy(hours: Reading, plan: TrainingPlan) -> Result:
    if plan.watts is not None:
        each, source = plan.watts, f"{plan.watts:g} W as given"
    elif plan.power_frac is None:
        return Missing("no power was given: pass --watts, or --power-frac of the device's TDP")
    elif plan.tdp_w is None:
        return Missing("the device's TDP is not known: pass --watts instead of --power-frac")
    else:
        each = plan.tdp_w * plan.power_frac
        source = f"{plan.power_frac:g} as given of a TDP of {plan.tdp_w:g} W"
    note = (
        f"{number_of(plan.devices, 'device')} x {source} x {significant(hours.value)} h; without"
        " hosts, network and cooling"
    )
    return _assumed(plan.devices * each * hours.value / 1000, "kWh", note)


def _carbon(energy: Result, plan: TrainingPlan) -> Result:
    if isinstance(energy, Missing):
        return energy
    if plan.grid_g_per_kwh is None:
        return Missing(
            "no grid intensity was given: --grid NAME, or --grid-g-per-kwh with --grid-source"
        )
    building = (
        "; the building's overhead is not in it (no PUE was given)"
        if plan.pue is None
        else f" x PUE {plan.pue:g} ({plan.pue_source or 'source not stated'})"
    )
    note = (
        f"{significant(energy.value)} kWh x {plan.grid_g_per_kwh:g} g/kWh"
        f" ({plan.grid_source or 'source not stated'}){building}"
    )
    return _assumed(energy.value * plan.grid_g_per_kwh * (plan.pue or 1), "g", note)


def _cost(hours: Reading, plan: TrainingPlan) -> Result:
    if plan.price_per_hour is None:
        return Missing("no price was given: pass --price-per-hour of one device")
    note = (
        f"{number_of(plan.devices, 'device')} x {significant(hours.value)} h"
        f" x {plan.price_per_hour:g} as given"
    )
    return _assumed(plan.devices * hours.value * plan.price_per_hour, plan.currency, note)

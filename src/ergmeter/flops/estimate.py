"""Before anything runs: does it fit, how long, how much energy, carbon and money.

The trap: a plan that looks like a measurement. Every figure here rests on inputs that somebody
stated (a utilisation, a power, a price), so every one has the basis "assumed" and names them; what
was not stated has no default, and what depends on it is absent and says which option it waits for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch, Sequences
from ergmeter.flops.memory import KINDS, step_memory
from ergmeter.records import Missing, Reading
from ergmeter.units import scaled, significant

if TYPE_CHECKING:
    from ergmeter.flops.graph import Graph
    from ergmeter.flops.memory import Memory, Setup
    from ergmeter.flops.work import Training
    from ergmeter.metrics.compute import Peak
    from ergmeter.records import Flops, Result

# Of an allocator's reserve on an H200, 8 to 15 % was lost to fragmentation in four recorded runs;
# what is planned to the last byte does not run.
USABLE_FRAC = 0.9
# torch gives cuBLAS a workspace for each thread that multiplies, one forward and one backward:
# 32 MiB on Hopper and later, 8 MiB before.
CUBLAS_BYTES = 2 * 32 * 2**20
AS_GIVEN = "as given"
# Where what a device holds does not grow with the batch, the search for the largest ends.
MOST_SEQUENCES = 2**40

# What each figure that somebody states is, as in what, and between which values it makes sense.
# nan is between none. Bounds that nobody meets keep what is worked out from them finite.
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
    """UsageError where a stated figure can't be what its option is."""
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
BATCH_MAX = "estimate.batch_size_max"
STEP = "estimate.step_s"
TOKENS_PER_S = "estimate.tokens_per_s"
DURATION = "estimate.duration_h"
ENERGY = "estimate.energy_kwh"
CARBON = "estimate.co2e_g"
COST = "estimate.cost"


@dataclass(frozen=True, slots=True)
class Room:
    """What one device has, and how much of it a plan may use."""

    device: str
    memory_bytes: float
    source: str
    usable_frac: float = USABLE_FRAC

    def __post_init__(self) -> None:
        check_stated("usable", self.usable_frac)
        check_stated("memory_gib", self.memory_bytes / 2**30)

    @property
    def usable_bytes(self) -> float:
        """The memory that is planned with."""
        return self.memory_bytes * self.usable_frac

    @property
    def said(self) -> str:
        """In words."""
        return (
            f"{scaled(self.usable_bytes, 'B')}, {significant(100 * self.usable_frac)} % of"
            f" {scaled(self.memory_bytes, 'B')} ({self.source})"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What somebody states of a training to come. Nothing of it has a default."""

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


def memory_results(memory: Memory, room: Room | Missing, largest: int | None) -> dict[str, Result]:
    """The peak by kind, and whether there is room. `largest`: sequences of a step that fit."""
    peak = memory.peak
    per = f"one device, {memory.sequences} sequences at a time, at the {peak.name}"
    found: dict[str, Result] = {
        PEAK: Reading(peak.total_bytes, "B", "assumed", note=f"{per}; fragmentation not in it")
    }
    for kind in KINDS:
        if peak.bytes[kind]:
            key = f"estimate.memory_{kind.replace(' ', '_')}_bytes"
            found[key] = Reading(peak.bytes[kind], "B", "assumed", note=f"{per}")
    if isinstance(room, Missing):
        return found | {SPARE: room, BATCH_MAX: room}
    spare = room.usable_bytes - peak.total_bytes
    found[SPARE] = Reading(spare, "B", "assumed", note=f"of {room.said}")
    ended = ", or more: not looked further" if (largest or 0) >= MOST_SEQUENCES else ""
    found[BATCH_MAX] = (
        Missing(f"not even one sequence a device fits {room.said}")
        if largest is None
        else Reading(largest, "sequences", "assumed", note=f"of a step, in {room.said}{ended}")
    )
    return found


def verdict(memory: Memory, room: Room | Missing) -> str:
    """One line: whether it fits."""
    needs = memory.peak.total_bytes
    if isinstance(room, Missing):
        return f"needs {scaled(needs, 'B')} a device; whether it fits is not known: {room.reason}"
    spare = room.usable_bytes - needs
    if spare >= 0:
        return f"fits with {scaled(spare, 'B')} to spare: needs {scaled(needs, 'B')} of {room.said}"
    return f"does not fit: needs {scaled(needs, 'B')}, has {room.said}"


def largest_batch(
    graph: Graph, batch: Batch, *, training: Training, setup: Setup, usable_bytes: float
) -> int | None:
    """Sequences of the largest step that fits, devices and micro-batches as they are.

    What does not grow with the batch fits at any size: the search ends at MOST_SEQUENCES a device.
    """
    spread = setup.parallel.data * setup.micro_batches

    def fits(each: int) -> bool:
        whole = _resized(batch, each * spread)
        memory = step_memory(graph, whole, training=training, setup=setup)
        return memory.peak.total_bytes <= usable_bytes

    if not fits(1):
        return None
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if low >= MOST_SEQUENCES:
            return low * spread
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * spread


def _resized(batch: Batch, sequences: int) -> Batch:
    """The same rows, more or fewer of them."""

    def scaled_count(each: Sequences) -> Sequences:
        return replace(each, count=math.ceil(each.count * sequences / batch.sequences))

    others = {name: tuple(map(scaled_count, held)) for name, held in batch.others.items()}
    whole = (Sequences(batch.seq_len, sequences),)
    return Batch(sequences, batch.seq_len, whole, others)


def plan_results(flops: Flops, plan: Plan, peak: Peak | Missing) -> dict[str, Result]:
    """Time, energy, carbon and cost, as far as what they rest on was stated."""
    step = _step(flops, plan, peak)
    if isinstance(step, Missing):
        return dict.fromkeys((STEP, TOKENS_PER_S, DURATION, ENERGY, CARBON, COST), step)
    tokens = flops.tokens_per_step or 1
    rate = Reading(
        tokens / step.value, "tokens/s", "assumed", note=f"{tokens} tokens a step; {step.note}"
    )
    found: dict[str, Result] = {STEP: step, TOKENS_PER_S: rate}
    if plan.tokens is None:
        reason = Missing("no number of tokens was given: pass --tokens")
        return found | dict.fromkeys((DURATION, ENERGY, CARBON, COST), reason)
    hours = Reading(
        plan.tokens / rate.value / 3600,
        "h",
        "assumed",
        note=f"{plan.tokens:g} tokens at {significant(rate.value)} tokens/s, without a pause for"
        " evaluation, checkpoints or failures",
    )
    energy = _energy(hours, plan)
    return found | {
        DURATION: hours,
        ENERGY: energy,
        CARBON: _carbon(energy, plan),
        COST: _cost(hours, plan),
    }


def _step(flops: Flops, plan: Plan, peak: Peak | Missing) -> Reading | Missing:
    if plan.mfu is None:
        return Missing(
            "no utilisation was given: pass --mfu, as `erg mfu` or a run of yours has it"
        )
    if isinstance(peak, Missing):
        return peak
    seconds = flops.model_per_step / (plan.mfu * plan.devices * peak.flops_per_s)
    note = (
        f"{scaled(flops.model_per_step, 'FLOP')} of the model ({flops.convention}) at MFU"
        f" {plan.mfu:g} ({plan.mfu_source}) on {plan.devices} x {peak.said}"
    )
    return Reading(seconds, "s", "assumed", note=note)


def _energy(hours: Reading, plan: Plan) -> Result:
    if plan.watts is not None:
        each, said = plan.watts, f"{plan.watts:g} W as given"
    elif plan.power_frac is None:
        return Missing("no power was given: pass --watts, or --power-frac of the device's TDP")
    elif plan.tdp_w is None:
        return Missing("the device's TDP is not known: pass --watts instead of --power-frac")
    else:
        each = plan.tdp_w * plan.power_frac
        said = f"{plan.power_frac:g} as given of a TDP of {plan.tdp_w:g} W"
    note = (
        f"{plan.devices} devices x {said} x {significant(hours.value)} h; hosts, network and"
        " cooling are not in it"
    )
    return Reading(plan.devices * each * hours.value / 1000, "kWh", "assumed", note=note)


def _carbon(energy: Result, plan: Plan) -> Result:
    if isinstance(energy, Missing):
        return energy
    if plan.grid_g_per_kwh is None:
        return Missing("no grid intensity was given: --grid-g-per-kwh with --grid-source")
    building = (
        "the building's overhead is not in it (no PUE was given)"
        if plan.pue is None
        else f"PUE {plan.pue:g} ({plan.pue_source or 'source not stated'})"
    )
    note = (
        f"{significant(energy.value)} kWh x {plan.grid_g_per_kwh:g} g/kWh"
        f" ({plan.grid_source or 'source not stated'}) x {building}"
    )
    value = energy.value * plan.grid_g_per_kwh * (plan.pue or 1)
    return Reading(value, "g", "assumed", note=note)


def _cost(hours: Reading, plan: Plan) -> Result:
    if plan.price_per_hour is None:
        return Missing("no price was given: --price-per-hour of one device")
    note = (
        f"{plan.devices} devices x {significant(hours.value)} h x {plan.price_per_hour:g} as given"
    )
    value = plan.devices * hours.value * plan.price_per_hour
    return Reading(value, plan.currency, "assumed", note=note)

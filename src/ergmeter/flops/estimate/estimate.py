"""Before anything runs: does it fit, how long, how much energy, carbon and money.

The trap: a plan that looks like a measurement. Every figure here rests on inputs that somebody
stated (a utilisation, a power, a price), so every one has the basis "assumed" and names them; what
was not stated has no default, and what depends on it is absent and says which option it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.flops.estimate.fit import MOST_SEQUENCES
from ergmeter.flops.estimate.memory import KINDS
from ergmeter.records import Missing, Reading
from ergmeter.units import duration, number_of, scaled, significant

if TYPE_CHECKING:
    from ergmeter.flops.estimate.memory import Memory
    from ergmeter.flops.estimate.serving import Serving
    from ergmeter.metrics.definitions.peaks import Peak
    from ergmeter.records import Flops, Result

# Of an allocator's reserve on an H200, 8 to 15 % was lost to fragmentation in four recorded runs;
# what is planned to the last byte does not run.
USABLE_FRAC = 0.9
# torch gives cuBLAS a workspace for each thread that multiplies, one forward and one backward:
# 32 MiB on Hopper and later, 8 MiB before.
CUBLAS_BYTES = 2 * 32 * 2**20
AS_GIVEN = "as given"

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
class TrainingPlan:
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


def memory_results(
    memory: Memory, room: Room | Missing, most: int | None, *, spread: int = 1
) -> dict[str, Result]:
    """The peak by kind, and whether there is room.

    `most`: sequences at a time that a device has room for; `spread`: such micro-batches in a step.
    """
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
        return found | dict.fromkeys((SPARE, MICRO_BATCH_MAX, BATCH_MAX), room)
    spare = room.usable_bytes - peak.total_bytes
    found[SPARE] = Reading(spare, "B", "assumed", note=f"of {room.said}")
    if most is None:
        none = Missing(f"not even one sequence a device fits {room.said}")
        return found | {MICRO_BATCH_MAX: none, BATCH_MAX: none}
    ended = ", or more: not looked further" if most >= MOST_SEQUENCES else ""
    note = f"in {room.said}{ended}"
    return found | {
        MICRO_BATCH_MAX: Reading(most, "sequences", "assumed", note=f"on one device, {note}"),
        BATCH_MAX: Reading(most * spread, "sequences", "assumed", note=f"of a step, {note}"),
    }


def verdict(needs: float, room: Room | Missing) -> str:
    """One line: whether so many bytes fit."""
    if isinstance(room, Missing):
        return f"needs {scaled(needs, 'B')} a device; whether it fits is not known: {room.reason}"
    spare = room.usable_bytes - needs
    if spare >= 0:
        return f"fits with {scaled(spare, 'B')} to spare: needs {scaled(needs, 'B')} of {room.said}"
    return f"does not fit: needs {scaled(needs, 'B')}, has {room.said}"


def serving_results(held: Serving, room: Room | Missing) -> dict[str, Result]:
    """What serving holds by kind, and how many sequences at a time there is room for."""
    per = f"one device, {held.sequences} sequences of {held.context} tokens"
    found: dict[str, Result] = {
        PEAK: Reading(
            held.total_bytes, "B", "assumed", note=f"{per}; activations and fragmentation not in it"
        ),
        "estimate.memory_weights_bytes": Reading(held.weights_bytes, "B", "assumed", note=per),
        "estimate.memory_cache_bytes": Reading(
            held.sequences * held.cache_bytes, "B", "assumed", note=per
        ),
    }
    if isinstance(room, Missing):
        return found | {SPARE: room, SEQUENCES_MAX: room}
    spare = room.usable_bytes - held.total_bytes
    found[SPARE] = Reading(spare, "B", "assumed", note=f"of {room.said}")
    most = held.sequences_max(room.usable_bytes)
    if most is None:
        why = (
            f"the weights alone, {scaled(held.weights_bytes, 'B')}, are more than {room.said}"
            if held.weights_bytes > room.usable_bytes
            else "nothing is cached for a sequence, so memory sets no limit"
        )
        return found | {SEQUENCES_MAX: Missing(why)}
    note = f"of {held.context} tokens each, on all devices, in {room.said} a device"
    return found | {SEQUENCES_MAX: Reading(most, "sequences", "assumed", note=note)}


def plan_results(flops: Flops, plan: TrainingPlan, peak: Peak | Missing) -> dict[str, Result]:
    """Time, energy, carbon and cost, as far as what they rest on was stated."""
    step = _step(flops, plan, peak)
    if isinstance(step, Missing):
        return dict.fromkeys((STEP, TOKENS_PER_S, DURATION, ENERGY, CARBON, COST), step)
    tokens = flops.tokens_per_step or 1
    rate = Reading(
        tokens / step.value,
        "tokens/s",
        "assumed",
        note=f"{tokens} tokens a step, in {duration(step.value)}",
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


def _step(flops: Flops, plan: TrainingPlan, peak: Peak | Missing) -> Reading | Missing:
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


def _energy(hours: Reading, plan: TrainingPlan) -> Result:
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
        f"{number_of(plan.devices, 'device')} x {said} x {significant(hours.value)} h; hosts,"
        " network and cooling are not in it"
    )
    return Reading(plan.devices * each * hours.value / 1000, "kWh", "assumed", note=note)


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
    value = energy.value * plan.grid_g_per_kwh * (plan.pue or 1)
    return Reading(value, "g", "assumed", note=note)


def _cost(hours: Reading, plan: TrainingPlan) -> Result:
    if plan.price_per_hour is None:
        return Missing("no price was given: --price-per-hour of one device")
    note = (
        f"{number_of(plan.devices, 'device')} x {significant(hours.value)} h"
        f" x {plan.price_per_hour:g} as given"
    )
    value = plan.devices * hours.value * plan.price_per_hour
    return Reading(value, plan.currency, "assumed", note=note)

"""Carbon (energy x grid intensity x PUE) and cost (device-hours and kWh x their prices).

No factor has a default. Each comes from the user, or from the table by a region that the user
names, with its source; without a grid intensity there is no carbon metric. (CodeCarbon without a
network assumes Canada; carbontracker multiplies by a PUE that is not stated.)

Location-based and market-based intensity are never mixed: a market-based value can be zero next to
a coal plant, so it has its own keys. Embodied carbon is spread over the devices' lifetime, and is
added only in the metric whose name says so.

Rent and electricity are never added: the price of a rented GPU-hour includes power and cooling,
while the owner of a GPU pays for electricity separately. Costs per token are of the window, like
all rates. Rent is also due outside the window: `cost.gpu_whole_run` covers the recorded time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.tokens import label_of, tokens
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.ranks import need_all, need_devices
from ergmeter.metrics.evidence.samples import ACCELERATORS
from ergmeter.metrics.evidence.window import TrainingWindow
from ergmeter.records import Reading, Window, mapped
from ergmeter.runlog.settings import NOT_STATED
from ergmeter.units import J_PER_KWH, duration, number_of, scaled, significant

# Device-hours. The number of devices is that sampled for all ranks, or the user's. It is never
# assumed to be 1: a Meter on one of several nodes samples only its own node.

_S_PER_H = 3600.0


def device_hours(evidence: Evidence, window: Window | TrainingWindow) -> tuple[float, str]:
    """Return the number of devices x the window's hours, and the text of that product."""
    devices, how = _devices(evidence)
    count = f"{number_of(devices, 'device')} ({how})"
    return devices * window.duration_s / _S_PER_H, f"{count} x {duration(window.duration_s)}"


def _devices(evidence: Evidence) -> tuple[int, str]:
    if evidence.has_company:
        raise NotMeasurable(
            "another training of the same command ran at the same time: device hours are of both;"
            " measure each in a command of its own"
        )
    declared = evidence.settings.num_devices
    if declared is not None:
        return declared, "as given"
    gpus = evidence.devices("gpu")
    if not gpus:
        why = evidence.why_no_device("accelerator", *ACCELERATORS)
        raise NotMeasurable(f"{why}: --num-devices gives their number")
    need_devices(evidence)
    return len(gpus), "seen in use"


_G_PER_KG = 1000
_MILLION = 1e6


_NO_INTENSITY = {
    "grid": "no grid intensity was given: --grid NAME (`erg grid` lists countries and regions), or"
    " --grid-g-per-kwh with --grid-source (your grid operator publishes it)",
    "market": "no market-based intensity was given: --market-g-per-kwh with --market-source (your"
    " supplier's, or 0 for what certificates cover)",
}


def co2e_g(evidence: Evidence, by: str = "grid") -> Reading:
    """Grams of CO2 equivalent for the energy of the window.

    `by`: "grid" for the intensity of the local grid, "market" for that of the power contract.
    """
    g_per_kwh = getattr(evidence.settings, f"{by}_g_per_kwh")
    if g_per_kwh is None:
        raise NotMeasurable(_NO_INTENSITY[by])
    source = getattr(evidence.settings, f"{by}_source") or NOT_STATED
    return _per_kwh(evidence, g_per_kwh, f"{significant(g_per_kwh)} g/kWh ({source})", "g")


def _per_kwh(evidence: Evidence, amount: float, text: str, unit: str) -> Reading:
    """The energy of the window x the building's overhead (PUE) x an amount per kWh."""
    used = run_j(evidence)
    pue, building = building_of(evidence)
    note = f"{scaled(used.value, 'J')} x {text}{building}; interval is the energy's alone"
    return scaled_by(used, amount * pue / J_PER_KWH, unit, note)


def building_of(evidence: Evidence) -> tuple[float, str]:
    """Return the PUE (1 if none was given), and its text for a note."""
    pue, source = evidence.settings.pue, evidence.settings.pue_source
    if pue is None:
        return 1.0, "; the building's overhead is not in it (no PUE was given)"
    return pue, f" x PUE {pue:g} ({source or NOT_STATED})"


def scaled_by(reading: Reading, factor: float, unit: str, note: str) -> Reading:
    """A reading times an assumed factor, with its interval."""
    return mapped(reading, lambda edge: edge * factor, unit=unit, basis="assumed", note=note)


def per_million_tokens(
    metric: Metric, key: str, title: str, *, of_energy: bool = True, order: int | None = None
) -> Metric:
    """Return `metric` per million tokens. `of_energy`: it needs the devices of all ranks.

    `order`: the position on the card; None: not on the card.
    """

    def compute(evidence: Evidence) -> Reading:
        reading = metric.compute(evidence)
        if of_energy:
            need_devices(evidence)
        need_all(evidence)
        amounts, label, _ = tokens(evidence)
        note = f"{label_of(evidence, label)}; {reading.note}"
        return scaled_by(reading, _MILLION / float(amounts.sum()), reading.unit, note)

    formula = f"1e6 x {metric.key} / tokens.total"
    needs = (*metric.needs, "steps with tokens")
    return replace(
        metric,
        key=key,
        title=title,
        formula=formula,
        needs=needs,
        compute=compute,
        quantity="energy per token" if of_energy else "speed",
        views=f"card {order} in energy" if order else "",
    )


def embodied_g(evidence: Evidence) -> Reading:
    """The window's share of embodied carbon: device-hours of the window / lifetime x carbon."""
    settings = evidence.settings
    if settings.embodied_kg is None:
        raise NotMeasurable(
            "no embodied carbon of a device was given: --embodied-kg with --embodied-source"
        )
    if settings.lifetime_h is None:
        raise NotMeasurable(
            "no lifetime of a device was given, over which its embodied carbon is spread:"
            " --lifetime-h (35040 is four years non-stop)"
        )
    hours, text = device_hours(evidence, evidence.span)
    note = (
        f"{text} of {settings.lifetime_h:g} h x {settings.embodied_kg:g} kg"
        f" ({settings.embodied_source or NOT_STATED}); hosts and building are not in it;"
        f" {evidence.window_note}"
    )
    value = hours / settings.lifetime_h * settings.embodied_kg * _G_PER_KG
    return Reading(value, "g", "assumed", note=note)


def co2e_with_embodied_g(evidence: Evidence) -> Reading:
    """Location-based carbon of the energy, plus the window's share of embodied carbon."""
    used, made = co2e_g(evidence), embodied_g(evidence)
    share = made.value / (used.value + made.value) if made.value else 0.0
    note = f"{100 * share:.3g} % of it from the making: {made.note}; the rest: {used.note}"
    return mapped(used, lambda grams: grams + made.value, basis="assumed", note=note)


_GRID = ("energy", "a grid intensity")
_MAKING = ("devices", "what their making emitted", "their lifetime")
_carbon = partial(Metric, unit="g", direction="lower")

_CARBON = _carbon(
    "carbon.co2e_g",
    "carbon",
    formula="energy.run_j / 3.6e6 x grid intensity (location-based) x PUE",
    needs=_GRID,
    compute=co2e_g,
    quantity="energy",
    views="card 660 in energy; report 150; model card 180 in all steps expected;"
    " ledger 70 as co2e_g; ledger notes 50 as co2e_g",
)
_MARKET_CARBON = _carbon(
    "carbon.market_co2e_g",
    "carbon, market-based",
    formula="energy.run_j / 3.6e6 x intensity by contract (market-based) x PUE",
    needs=("energy", "an intensity by contract"),
    compute=partial(co2e_g, by="market"),
    quantity="energy",
    views="card 680 in energy",
)
_PER_MILLION = "carbon per million tokens"

METRICS = [
    _CARBON,
    per_million_tokens(_CARBON, "carbon.co2e_per_million_tokens_g", _PER_MILLION, order=670),
    _MARKET_CARBON,
    per_million_tokens(
        _MARKET_CARBON, "carbon.market_co2e_per_million_tokens_g", f"{_PER_MILLION}, market-based"
    ),
    _carbon(
        "carbon.embodied_g",
        "carbon of the devices' making",
        formula="devices x window / lifetime x CO2e of making one",
        needs=_MAKING,
        compute=embodied_g,
    ),
    _carbon(
        "carbon.co2e_with_embodied_g",
        "carbon, making included",
        formula="carbon.co2e_g + carbon.embodied_g",
        needs=(*_GRID, *_MAKING),
        compute=co2e_with_embodied_g,
    ),
]


# Cost.

UNIT = "price units"  # where no currency was given
_WATCHED = "start, warm-up, evaluation and checkpoints included; not the time before and after"


def gpu(evidence: Evidence, *, is_whole_run: bool = False) -> Reading:
    """The devices' rent for the window, or for the whole run."""
    price = evidence.settings.price_per_gpu_hour
    if price is None:
        raise NotMeasurable("no price of a device was given: --price-per-gpu-hour with --currency")
    hours, text = device_hours(evidence, evidence.watched if is_whole_run else evidence.span)
    which = _WATCHED if is_whole_run else evidence.window_note
    note = f"{text} x {price:g} an hour each; {which}"
    return Reading(hours * price, _unit(evidence), "assumed", note=note)


def energy(evidence: Evidence) -> Reading:
    """The cost of the energy of the window."""
    price = evidence.settings.price_per_kwh
    if price is None:
        raise NotMeasurable("no price of electricity was given: --price-per-kwh with --currency")
    return _per_kwh(evidence, price, f"{price:g} a kWh", _unit(evidence))


def _unit(evidence: Evidence) -> str:
    return evidence.settings.currency or UNIT


_RENT = ("devices", "a price per GPU-hour")
_cost = partial(Metric, unit="currency", direction="lower")

_GPU = _cost(
    "cost.gpu",
    "cost of the devices",
    formula="devices x window x price per GPU-hour",
    needs=_RENT,
    compute=gpu,
)
_ENERGY = _cost(
    "cost.energy",
    "cost of the energy",
    formula="energy.run_j / 3.6e6 x price per kWh x PUE",
    needs=("energy", "a price per kWh"),
    compute=energy,
    quantity="energy",
    views="card 710 in energy; ledger 80 as energy_cost; ledger notes 60 as energy_cost",
)

COST_METRICS = [
    _GPU,
    _cost(
        "cost.gpu_whole_run",
        "cost of the devices, whole run",
        formula="devices x time from the first record to the last x price per GPU-hour",
        needs=_RENT,
        compute=partial(gpu, is_whole_run=True),
        quantity="whole-run speed",
        views="card 690 in energy; report 160; ledger 90 as gpu_cost; ledger notes 70 as gpu_cost",
    ),
    per_million_tokens(
        _GPU,
        "cost.gpu_per_million_tokens",
        "cost of the devices per million tokens",
        of_energy=False,
        order=700,
    ),
    _ENERGY,
    per_million_tokens(
        _ENERGY, "cost.energy_per_million_tokens", "cost of the energy per million tokens"
    ),
]

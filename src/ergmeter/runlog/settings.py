"""The user's declarations about a run, checked once and stored in the writer's header.

Nothing has a default value: an undeclared grid intensity is absent, and so is what would be
computed from it.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, fields, replace
from math import prod
from typing import Any

from ergmeter.errors import NotMeasurable, UsageError, suggestion
from ergmeter.records import DTYPES

ORDER = ("tp", "cp", "ep", "dp", "pp")
WORDS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "dp": "data-parallel",
    "pp": "pipeline-parallel",
}
_HOW = 'give sizes such as "tp=2,pp=4" (tp, cp, ep, dp, pp; order=tp-cp-ep-dp-pp)'


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """How a training is laid out over its ranks: sizes by dimension, and the order of ranks.

        "tp=2,pp=4"                   sizes; data-parallel is what is left of the world
        "tp=2,pp=4,order=tp-pp-dp"    which ranks are neighbours, the innermost first

    Eight ranks that each count 4096 tokens are 32 768 tokens if data-parallel, and 4096 if tensor-
    or pipeline-parallel. The counts do not tell, so the user or the framework declares the layout.

    - tp (tensor) and pp (pipeline): ranks have the same tokens.
    - cp (context): each rank has its part of every sequence, so tokens add up and samples do not.
    - dp (data): sharded (FSDP, ZeRO) or not.
    - ep (expert): experts are spread over ranks that are data-parallel in all else, so it changes
      no count (as in Megatron-LM, DeepSpeed and torchtitan).

    Without an order, ranks are numbered as in Megatron-LM, tp-cp-ep-dp-pp.
    """

    sizes: dict[str, int]
    order: tuple[str, ...] = ORDER

    @classmethod
    def parsed(cls, text: object) -> ParallelLayout:
        """Parse a layout such as "tp=2,pp=4". Raises UsageError if it is not valid."""
        if not isinstance(text, str) or not text.strip():
            raise UsageError(f"layout {text!r} is not valid; {_HOW}")
        sizes: dict[str, int] = {}
        order: tuple[str, ...] = ORDER
        for part in text.replace(" ", "").split(","):
            name, _, value = part.partition("=")
            if name == "order":
                order = _order(value)
            elif name not in WORDS or not value.isdecimal() or int(value) < 1 or name in sizes:
                raise UsageError(f"layout {text!r}: {part!r} is not valid; {_HOW}")
            else:
                sizes[name] = int(value)
        absent = [name for name in sizes if name not in order and name != "ep" and sizes[name] > 1]
        if absent:
            raise UsageError(f"layout {text!r}: {absent[0]} is not in the order {'-'.join(order)}")
        return cls(sizes, order)

    def check(self, world: int) -> None:
        """Raise UsageError if `world` ranks can't have this layout."""
        together = prod(size for name, size in self.sizes.items() if name != "ep")
        fits = world == together if "dp" in self.sizes else world % together == 0
        if not fits:
            must = "is not" if "dp" in self.sizes else "does not divide"
            ranks = "the 1 rank" if world == 1 else f"the {world} ranks"
            raise UsageError(f"layout {self}: {self._product()} {must} {ranks} of this training")
        experts = self.sizes.get("ep", 1)
        if (world // self.sizes.get("pp", 1)) % experts:
            raise UsageError(
                f"layout {self}: {experts} expert-parallel ranks do not divide the"
                f" {world // self.sizes.get('pp', 1)} ranks of a pipeline stage"
            )

    def at(self, rank: int, world: int) -> dict[str, int]:
        """Return a rank's index along each dimension."""
        self.check(world)
        sizes = {name: self.sizes.get(name, 1) for name in ORDER if name != "ep"}
        sizes["dp"] = world // prod(size for name, size in sizes.items() if name != "dp")
        position = {}
        for name in (*self.order, *(n for n in ORDER if n not in self.order)):
            if name != "ep":
                rank, position[name] = divmod(rank, sizes[name])
        return position

    def _product(self) -> str:
        sizes = [size for name, size in self.sizes.items() if name != "ep"]
        factors = " x ".join(str(size) for size in sizes)
        return f"{factors} = {prod(sizes)}" if len(sizes) > 1 else factors or "1"

    def __str__(self) -> str:
        parts = [f"{name}={size}" for name, size in self.sizes.items()]
        return ",".join(parts + ([f"order={'-'.join(self.order)}"] if self.order != ORDER else []))


def _order(text: str) -> tuple[str, ...]:
    names = tuple(text.split("-"))
    unknown = [name for name in names if name not in WORDS]
    if unknown or len(set(names)) < len(names):
        raise UsageError(f"order {text!r} is not valid: give tp, cp, ep, dp and pp once each, as in"
                         " tp-cp-ep-dp-pp, neighbours first")  # fmt: skip
    return names


# The three ways to declare a warm-up, which exclude each other.
WARMUP = ("warmup", "warmup_steps", "warmup_s")
_CARBON_AND_MONEY = (
    *("grid_g_per_kwh", "market_g_per_kwh", "embodied_kg"),
    *("price_per_gpu_hour", "price_per_kwh"),
)
# A figure and its source: a new figure without a source must not keep the old figure's source.
_SOURCED = (
    ("grid_g_per_kwh", "grid_source"),
    ("market_g_per_kwh", "market_source"),
    ("embodied_kg", "embodied_source"),
)
NOT_STATED = "source not stated"
WINDOWS = ("training", "whole", "unbroken")
_STEPS = re.compile(r"(\d*):(\d*)")


@dataclass(frozen=True, slots=True)
class Settings:
    """The declared facts of a run. None: not declared."""

    warmup_steps: int | None = None  # leave out the first so many steps
    warmup_s: float | None = None  # leave out steps that began within so many seconds of the first
    warmup: str | None = None  # "auto": leave out a slow beginning, also where marks say otherwise
    # training (as None), whole, or STEP:STEP, the last not included; unbroken: from the end of a
    # declared warm-up on, evaluation and checkpoints included, as SFT-Play has it
    window: str | None = None
    parameters: int | None = None  # of the model, for the per-parameter rates
    tokens_per_step: int | None = None  # where the program does not say; figures are then "assumed"
    samples_per_step: int | None = None
    grid_g_per_kwh: float | None = None  # location-based; `grid` by name gives it and its source
    grid_source: str | None = None
    market_g_per_kwh: float | None = None  # what the contract says, beside the grid's
    market_source: str | None = None
    pue: float | None = None
    pue_source: str | None = None
    embodied_kg: float | None = None  # CO2e of making one device
    embodied_source: str | None = None
    lifetime_h: float | None = None  # in use, that the making is spread over
    price_per_gpu_hour: float | None = None
    price_per_kwh: float | None = None
    currency: str | None = None
    device: str | None = None  # whose peak and bandwidth to take, whatever its driver calls it
    dtype: str | None = None  # what products are computed in: bf16, fp8, ...
    peak_flops_per_s: float | None = None  # dense, of one device, where the table is not to be used
    peak_source: str | None = None
    devices: str | None = None  # GPUs that count: "all", "none", or their indices or ids, by commas
    num_devices: int | None = None  # that the tokens are of, where they can't be seen
    layout: str | None = None  # which ranks work on the same tokens: "tp=2,pp=4" (`runlog.layout`)
    job: str | None = None  # what this run is a part of, where a job is stopped and resumed
    note: str | None = None

    @property
    def warmups(self) -> tuple[object, ...]:
        """The declared value of each setting of WARMUP; None if not declared."""
        return tuple(getattr(self, name) for name in WARMUP)

    @property
    def steps_range(self) -> tuple[int, int | None] | None:
        """The first step of a window STEP:STEP and the one after its last; None for other kinds."""
        match = _STEPS.fullmatch(self.window or "")
        return None if match is None else (int(match[1] or 0), int(match[2]) if match[2] else None)

    def __post_init__(self) -> None:
        if sum(way is not None for way in self.warmups) > 1:
            raise UsageError("give one of warmup_steps, warmup_s and warmup, not several")
        if self.warmup not in (None, "auto"):
            raise UsageError(
                f'warmup can be "auto"; got {self.warmup!r}: a number of steps is warmup_steps, of'
                " seconds warmup_s"
            )
        _check_window(self.window)
        for name in ("warmup_steps", "warmup_s", *_CARBON_AND_MONEY):
            self._check(name, at_least=0)
        for name in ("parameters", "tokens_per_step", "samples_per_step", "num_devices"):
            self._check(name, at_least=1)
        for name in ("pue", "lifetime_h"):
            self._check(name, at_least=1.0)
        self._check("peak_flops_per_s", at_least=1e9)
        _check_currency(self.currency)
        if self.devices is not None and not all(map(str.strip, str(self.devices).split(","))):
            raise UsageError(
                f"devices are indices or UUIDs as in 0,2, or all, or none; got {self.devices!r}"
            )
        if self.dtype not in (None, *DTYPES):
            raise UsageError(f"no type {self.dtype!r}; there are {', '.join(DTYPES)}")
        if self.layout is not None:
            ParallelLayout.parsed(self.layout)

    @classmethod
    def declared(cls, settings: Settings | None, more: dict[str, Any]) -> Settings:
        """Return settings with the fields in `more` replaced. Raises UsageError for unknown names.

        `grid`, the name of a country or region, is not stored. Its figure and source are, so that a
        later version of the table does not change what the run says.
        """
        names = {*(field.name for field in fields(cls)), "grid"}
        unknown = sorted(more.keys() - names)
        if unknown:
            hint = suggestion(unknown[0], names)
            raise UsageError(
                f"no setting {unknown[0]!r}; {hint}there are {', '.join(sorted(names))}"
            )
        if more.get("device") is not None:
            _check_device(more["device"])
        if "grid" in more:
            from ergmeter.hardware.grid import with_grid  # noqa: PLC0415  as for a device

            more = with_grid(more)
        return replace(settings or cls(), **_with_sources(more))

    def as_json(self) -> dict[str, Any]:
        """The fields that were declared."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def _check(self, name: str, *, at_least: float) -> None:
        value = getattr(self, name)
        if value is None:
            return
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < at_least:
            raise UsageError(f"{name} must be a number of {at_least:g} or more; got {value!r}")


def _with_sources(more: dict[str, Any]) -> dict[str, Any]:
    silent = {
        source: NOT_STATED
        for figure, source in _SOURCED
        if more.get(figure) is not None and more.get(source) is None
    }
    return {**more, **silent}


def _check_window(window: object) -> None:
    if window is None or window in WINDOWS:
        return
    match = _STEPS.fullmatch(window) if isinstance(window, str) else None
    if match is None or window == ":":
        raise UsageError(
            "window is training, whole, unbroken or STEP:STEP (100:200, 100:, :200);"
            f" got {window!r}"
        )
    if match[2] and int(match[1] or 0) >= int(match[2]):
        raise UsageError(f"window {window} holds no step: its end must be above its start")


def _check_currency(name: object) -> None:
    if name is not None and not (isinstance(name, str) and name.strip()):
        raise UsageError(f"currency must be a name, as in USD; got {name!r}")


def _check_device(name: object) -> None:
    """Raise UsageError for an unknown device before the run, not in its report hours later.

    A stored run may name a device of another machine's table, so it is not checked again.
    """
    from ergmeter.hardware.table import candidates  # noqa: PLC0415  the table is for those who ask

    if not isinstance(name, str):
        raise UsageError(f"device must be a name, as `erg peaks` lists them; got {name!r}")
    try:
        candidates(name)
    except NotMeasurable as error:
        raise UsageError(str(error)) from error

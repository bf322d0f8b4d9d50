"""The core types: records that are written to a run, and results of metrics.

A field names its unit. An absent value is None, never 0. A result is a `Reading` with its basis and
interval, or a `Missing` with the reason.

Records (`Sample`, `Step`, `Reported`, `Mark`) are written one at a time and read back as columns:
a metric takes numpy arrays and never loops over samples.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from numbers import Integral, Real
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    ParamSpec,
    TypeAlias,
    TypeVar,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.units import NS_PER_S, in_unit

if TYPE_CHECKING:  # `import ergmeter` is quick: numpy is loaded when there are columns to hold
    import numpy as np
    import numpy.typing as npt

TimeArray: TypeAlias = "npt.NDArray[np.int64]"
FloatArray: TypeAlias = "npt.NDArray[np.float64]"

Phase = Literal["train", "eval", "checkpoint", "data", "prefill", "decode", "idle"]
PHASES: tuple[str, ...] = get_args(Phase)

Basis = Literal["measured", "derived", "reported", "assumed"]
# From the strongest to the weakest: a metric has the basis of its weakest input.
BASES: tuple[Basis, ...] = ("measured", "derived", "reported", "assumed")

Direction = Literal["higher", "lower", "neither"]

# Data types of matrix products.
DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4", "int8")


def dtype_named(name: str | None) -> str | None:
    """The short name of a data type, from that name or torch's. UsageError for any other."""
    if name is None:
        return None
    longer = {"float32": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}
    short = longer.get(name.lower(), name.lower())
    if short not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}: choose from {', '.join(DTYPES)}")
    return short


@dataclass(frozen=True, slots=True)
class Sample:
    """One device at one instant. A field is None where the device does not report it.

    Names that end in a plain unit are gauges, except the counters, which only ever grow:
    energy_j, cpu_s, and the four traffic fields. The activity fields, from graphics_frac to
    nvlink_received_bytes_per_s, are means over the activity_s seconds that end at t_ns; where
    activity_s is None, over the time since the previous reading.
    """

    t_ns: int
    device: str
    power_w: float | None = None  # the nearest to instantaneous that the device offers
    power_average_w: float | None = None  # a sensor's own average; about a second on NVIDIA
    energy_j: float | None = None
    memory_bytes: int | None = None
    memory_peak_bytes: int | None = None  # a program's largest process: the kernel's own mark
    process_bytes: int | None = None  # of a GPU's memory in use, the measured program's share
    allocated_bytes: int | None = None  # what a framework's allocator holds in tensors
    allocated_peak_bytes: int | None = None  # its own high-water mark
    reserved_bytes: int | None = None  # reserved from the device: its high-water mark
    split_bytes: int | None = None  # free parts of blocks in use: its high-water mark
    busy_frac: float | None = None  # share of time with any work: NVML's "GPU util", CPU load
    activity_s: float | None = None  # what the fields from here on are the mean of
    graphics_frac: float | None = None  # of the time: any kernel
    sm_frac: float | None = None  # of the multiprocessors: with a warp
    occupancy_frac: float | None = None  # of the warps there is room for
    tensor_frac: float | None = None  # of the time: tensor cores of any type
    tensor_half_frac: float | None = None  # HMMA: 16 bits and fewer, and TF32
    tensor_int_frac: float | None = None  # IMMA
    tensor_double_frac: float | None = None  # DFMA
    dram_frac: float | None = None  # of the memory's peak bandwidth
    pcie_sent_bytes_per_s: float | None = None
    pcie_received_bytes_per_s: float | None = None
    nvlink_sent_bytes_per_s: float | None = None
    nvlink_received_bytes_per_s: float | None = None
    clock_hz: float | None = None
    temperature_c: float | None = None
    throttled: int | None = None  # the device's own bit mask of reasons
    cpu_s: float | None = None
    iowait_frac: float | None = None
    disk_read_bytes: int | None = None
    disk_written_bytes: int | None = None
    disk_free_bytes: int | None = None
    net_received_bytes: int | None = None
    net_sent_bytes: int | None = None


# Reasons in `Sample.throttled`, as NVML's clocks-event bits.
THROTTLE_POWER_CAP = 0x4
THROTTLE_HEAT = 0x20 | 0x40  # software and hardware thermal slowdown
THROTTLE_BRAKE = 0x8 | 0x80  # hardware slowdown and power brake: half the clock or less


@dataclass(frozen=True, slots=True)
class Step:
    """A span of work with its tokens: one optimizer step, or several if only those were seen.

    Token counts are this rank's own: computed (padding included), real, and loss-bearing.
    """

    start_ns: int
    end_ns: int
    index: int | None = None
    steps: int | None = 1  # optimizer steps in this span; None: the log did not say how many
    phase: str = "train"
    tokens_computed: int | None = None
    tokens_real: int | None = None
    tokens_loss: int | None = None
    samples: int | None = None
    micro_steps: int = 1
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    rank: int = 0
    host_start_ns: int | None = None  # where start and end are the device's times: the host's
    host_end_ns: int | None = None

    @property
    def window(self) -> Window:
        """The span as a window."""
        return Window(self.start_ns, self.end_ns)


# The values of a Step's fields, in their order: `Step(*values)`. This is what a training thread
# makes, at a tenth of the cost of a Step.
StepValues: TypeAlias = "tuple[Any, ...]"

STEP_LOSS = "loss"  # the name of a Reported that is a step's loss, where no Step holds it


@dataclass(frozen=True, slots=True)
class Reported:
    """A value that a program printed about itself; not measured by ergmeter."""

    t_ns: int
    name: str
    value: float
    unit: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A named instant: warmup_end, probe_failed, device_lost, ended, closed."""

    t_ns: int
    name: str
    detail: str = ""


Record: TypeAlias = "Sample | Step | Reported | Mark"

ColumnKind = Literal["time", "text", "count", "float"]
_KIND_OF: dict[Any, ColumnKind] = {
    int: "count",
    int | None: "count",
    str: "text",
    float: "float",
    float | None: "float",
}


def _column_kinds(record: type) -> dict[str, ColumnKind]:
    """The kind of each field's column. A "count" is an integer that may be absent."""
    return {
        name: "time" if hint is int and name.endswith("_ns") else _KIND_OF[hint]
        for name, hint in get_type_hints(record).items()
    }


# The tables of a run: a column for each field of the record, in its order.
COLUMN_KINDS: dict[str, dict[str, ColumnKind]] = {
    "samples": _column_kinds(Sample),
    "steps": _column_kinds(Step),
    "reported": _column_kinds(Reported),
    "marks": _column_kinds(Mark),
}

# Fields of hardware counters, which are means over a span of time: see `Sample`.
_SAMPLED = tuple(COLUMN_KINDS["samples"])
ACTIVITY = _SAMPLED[_SAMPLED.index("graphics_frac") : _SAMPLED.index("clock_hz")]


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A span of monotonic time. Never empty, so that dividing by it is always allowed."""

    start_ns: int
    end_ns: int

    def __post_init__(self) -> None:
        if self.end_ns <= self.start_ns:
            raise UsageError(f"a window must end after it starts: {self.start_ns} to {self.end_ns}")

    @property
    def duration_s(self) -> float:
        """The length of the window."""
        return (self.end_ns - self.start_ns) / NS_PER_S


_Record = TypeVar("_Record")
_hints = cache(get_type_hints)


def of_type(value: object, kind: type[_Record]) -> _Record:
    """Return a value from JSON if it is of type `kind`; else raise TypeError."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _is_of(value: object, hint: object) -> bool:
    """True if a value from JSON can be in a field of this type."""
    inner = get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, inner[0]) for item in value)
    if inner:
        return any(_is_of(value, each) for each in inner)
    if hint is float:  # JSON of another program may have 2 for 2.0
        return type(value) in (int, float) and abs(cast("float", value)) < math.inf
    return type(value) is hint if isinstance(hint, type) else value == hint


def _as_field(value: object, hint: object) -> object:
    """Convert a value for a field: numbers to int or float by the field's type, lists to tuples."""
    if type(value) is not bool and isinstance(value, Real):
        number = int(value) if isinstance(value, Integral) else float(value)
        return int(number) if int in get_args(hint) and number % 1 == 0 else number
    return tuple(value) if isinstance(value, list) else value


def _from_json(record: Callable[..., _Record], stored: object) -> _Record:
    """A record from JSON; fields of later versions are ignored. TypeError if it is damaged."""
    hints, values = _hints(record), of_type(stored, dict)
    fields = {name: _as_field(values[name], hints[name]) for name in values if name in hints}
    for name, value in fields.items():
        if not _is_of(value, hints[name]):
            raise TypeError(f"{name} is {value!r}")
    return record(**fields)


@dataclass(frozen=True, slots=True)
class WorkPart:
    """A named part of the FLOPs that the hardware computes in a step."""

    name: str  # model, recomputation, padding, other models, generation
    flops: float | None  # of a step; of padding, of a position without a token. None: not counted
    note: str = ""


@dataclass(frozen=True, slots=True)
class Flops:
    """The work of one step, with the convention it was counted under. Stored in the run."""

    model_per_step: float
    convention: str
    engine: str
    hardware_per_step: float | None = None  # recomputation included; MFU never uses it, HFU does
    hardware_per_padding: float | None = None  # of a position that holds no token, on top of that
    tokens_per_step: int | None = None  # of that step: steps differ in size
    bytes_per_step: float | None = None  # the least that inference must move
    assumptions: tuple[str, ...] = ()
    samples_per_step: int | None = None  # of that step
    # Work beside the trained model's: other models, generation. None: it was not looked for.
    other_work: tuple[WorkPart, ...] | None = None
    # Products of the trained model that could not be counted: `model_per_step` is a lower bound.
    not_counted: tuple[str, ...] = ()

    @property
    def hardware(self) -> tuple[WorkPart, ...]:
        """All computed FLOPs by part; parts that are not known to exist are left out."""
        parts = [WorkPart("model", self.model_per_step, "; ".join(self.not_counted))]
        if self.hardware_per_step is not None:
            parts.append(WorkPart("recomputation", self.hardware_per_step - self.model_per_step))
        if self.hardware_per_padding is not None:
            parts.append(WorkPart("padding", self.hardware_per_padding, "of one position"))
        return (*parts, *(self.other_work or ()))

    @classmethod
    def from_json(cls, stored: object) -> Flops:
        """Flops from a run's header. TypeError if they are damaged."""
        fields = {name: value for name, value in of_type(stored, dict).items() if value is not None}
        if "other_work" in fields:
            fields["other_work"] = tuple(_from_json(WorkPart, w) for w in fields["other_work"])
        return _from_json(cls, fields)

    @classmethod
    def checked(cls, flops: Flops | Iterable[Flops]) -> tuple[Flops, ...]:
        """Return Flops as they will be read back from a run. UsageError if they can't be stored."""
        each = tuple(flops) if isinstance(flops, Iterable) else (flops,)
        for one in each:
            if not isinstance(one, Flops):
                raise UsageError(f"flops= takes Flops(...), one or several; got {one!r}")
        try:
            return tuple(cls.from_json(asdict(one)) for one in each)
        except TypeError as error:
            why = "amounts are finite, counts whole, assumptions a tuple of texts"
            raise UsageError(f"flops= can't be stored: {error} ({why})") from None


@dataclass(frozen=True, slots=True)
class Device:
    """A device as its driver describes it. Samples of all ranks refer to it by its id."""

    id: str  # unique on earth where the maker allows it: a GPU's UUID
    kind: Literal["gpu", "cpu", "dram", "module", "allocator", "process", "node", "self"]
    name: str
    probe: str
    # Driver, power limit, which power field, ...
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reading:
    """A number, how it was obtained, and how sure we are. `low` and `high` say where it may lie.

    `impossible` is set where the value cannot be right, such as an MFU of 985 %, and gives the
    reason. The value is shown with that mark, and nothing is computed from it.
    """

    value: float
    unit: str
    basis: Basis
    low: float | None = None
    high: float | None = None
    note: str = ""
    impossible: str = ""

    @property
    def mark(self) -> str:
        """The text printed right after the value."""
        return " (impossible)" if self.impossible else ""

    def __str__(self) -> str:
        """192,642 tokens/s (187,000-198,300), measured."""
        between = interval_text(self).removesuffix(f" {self.unit}").replace(" to ", "-")
        return f"{value_text(self)}{f' ({between})' if between else ''}, {self.basis}"

    def _repr_html_(self) -> str:
        from html import escape  # noqa: PLC0415  only notebooks need it

        return f'<span title="{escape(self.note)}">{escape(str(self))}</span>'


def value_text(reading: Reading) -> str:
    """The value in a readable unit, marked if it is impossible."""
    return in_unit(reading.value, reading.unit, beside=reading.value) + reading.mark


def interval_text(reading: Reading) -> str:
    """The interval, with the unit once if both ends share it; empty without one."""
    if reading.low is None or reading.high is None:
        return ""
    # Around 0 the prefix is that of the larger end.
    beside = reading.value or max(reading.low, reading.high, key=abs)
    low, high = (in_unit(end, reading.unit, beside=beside) for end in (reading.low, reading.high))
    number, _, unit = low.partition(" ")
    has_same = " " not in unit and high.endswith(f" {unit}") and high.count(" ") == 1
    return f"{number if has_same else low} to {high}"


def mapped(reading: Reading, change: Callable[[float], float], **fields: Any) -> Reading:  # noqa: ANN401
    """Apply `change` to a reading's value and to both ends of its interval."""
    low, high = (None if edge is None else change(edge) for edge in (reading.low, reading.high))
    return replace(reading, value=change(reading.value), low=low, high=high, **fields)


def spread_frac(reading: Reading) -> float | None:
    """Half the interval as a share of the value; None without one, or if 0 is in it."""
    if reading.low is None or reading.high is None or reading.low <= 0 <= reading.high:
        return None
    return (reading.high - reading.low) / 2 / abs(reading.value)


@dataclass(frozen=True, slots=True)
class Missing:
    """The reason why a metric has no value, as text for the user."""

    reason: str

    def __str__(self) -> str:
        """ "not measured: " and the reason."""
        return f"not measured: {self.reason}"


Result: TypeAlias = "Reading | Missing"

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def present(result: Answer | Missing) -> Answer:
    """The result. Raises NotMeasurable with its reason if it is missing."""
    if isinstance(result, Missing):
        raise NotMeasurable(result.reason)
    return result


def or_none(
    compute: Callable[Asked, Answer], /, *arguments: Asked.args, **further: Asked.kwargs
) -> Answer | None:
    """The result of a function; None if it is not measurable."""
    try:
        return compute(*arguments, **further)
    except NotMeasurable:
        return None


def or_missing(
    compute: Callable[Asked, Answer], /, *arguments: Asked.args, **further: Asked.kwargs
) -> Answer | Missing:
    """The result of a function; the reason if it is not measurable."""
    try:
        return compute(*arguments, **further)
    except NotMeasurable as error:
        return Missing(str(error))


def or_noted(
    absent: dict[str, str],
    name: str,
    compute: Callable[Asked, Answer],
    /,
    *arguments: Asked.args,
    **further: Asked.kwargs,
) -> Answer | None:
    """The result of a function; None if it is not measurable, with the reason in `absent`."""
    try:
        return compute(*arguments, **further)
    except NotMeasurable as error:
        absent[name] = str(error)
        return None


def result_from_json(stored: object) -> Result:
    """A result from a run's header. TypeError if it is damaged."""
    is_missing = "reason" in of_type(stored, dict)
    return _from_json(Missing, stored) if is_missing else _from_json(Reading, stored)


def _views() -> Any:  # noqa: ANN401  a module of a higher layer, loaded when it is needed
    return importlib.import_module("ergmeter.views.notebook")


class Displayed:
    """Prints as the card or table of a terminal; in a notebook as HTML, runs with a chart."""

    __slots__ = ()

    def __str__(self) -> str:
        """The text of a terminal, 79 columns wide."""
        return str(_views().text(self))

    def _repr_html_(self) -> str:
        return str(_views().html(self))

    def _repr_mimebundle_(self, **_wanted: object) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self._repr_html_()}


@dataclass(frozen=True, slots=True)
class Summary(Displayed):
    """Every metric of the catalogue for one run: for the run, and device by device."""

    run: str
    status: str
    readings: dict[str, Result]
    devices: dict[str, dict[str, Result]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    window: dict[str, Any] = field(default_factory=dict)  # its kind, its warm-up, what was cut
    # Reads the run again for the card. Not the evidence itself, whose columns fill memory.
    evidence: Callable[[], Any] | None = field(default=None, repr=False, compare=False)


# How far above its bound a value without an interval may lie: timers and rounding reach 1.0003.
BOUND_TOLERANCE = 1.01


def is_above(reading: Reading, upper_bound: float) -> bool:
    """True if the whole interval is above the bound; without an interval, if the value is 1 % above
    it."""
    if reading.low is not None:
        return reading.low > upper_bound
    return reading.value > upper_bound * BOUND_TOLERANCE


def weakest(*bases: Basis) -> Basis:
    """The basis of a metric that is computed from inputs of these bases."""
    return BASES[max(BASES.index(basis) for basis in bases)]

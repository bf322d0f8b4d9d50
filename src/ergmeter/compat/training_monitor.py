"""TrainingMonitor, and the functions of a profiler-based MFU monitor, under their original names.

    monitor = TrainingMonitor("./outputs", config, flops_profile_freq=500, model=model)
    for step in range(total_steps):
        ...
        monitor.log_step(step, epoch, loss, grad_norm, learning_rate, attention_mask)

    mfu = calculate_mfu_with_profiler(model, batch_size=4, seq_length=512, step_time=0.1)

The original ran a forward pass under torch.profiler: that counts a third of a training step at
best, leaves the model in eval mode, and adds its time to the next step. It assumed an A100's peak
for unknown GPUs and clamped MFU at 1. Here the model is not run: FLOPs are counted from its
configuration or, without one, on tensors without memory. A step lasts from the end of one call to
the start of the next. Unknown values are nan, with one warning, never 0. A wrong option raises when
the monitor is made; after that nothing raises into the training. docs/from-training-monitor.md
lists all differences.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import shutil
import time
import warnings
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from ergmeter.atomic_write import replacing
from ergmeter.errors import ErgmeterError, NotMeasurable, UsageError, closest
from ergmeter.flops.counted.count import count
from ergmeter.flops.live import model_work
from ergmeter.integrations.batches import Counts
from ergmeter.integrations.guard import Guarded, guarded, reason_of, say, warn_once
from ergmeter.integrations.training import Training
from ergmeter.integrations.unsettled_steps import Fetch, device_events
from ergmeter.metrics.definitions.peaks import table_peak
from ergmeter.records import BOUND_TOLERANCE, Missing, or_missing, present
from ergmeter.runlog.process_group import own_rank, world_size
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from torch import nn

    from ergmeter.metrics.live.totals import Amount

__all__ = ["TrainingMonitor", "calculate_mfu_with_profiler", "get_gpu_peak_flops", "knowledge"]

# -- settings --------------------------------------------------------------------------------------
# The documented key, `monitoring.flops_profile_freq`, was never read by the original, which read
# `monitor.freq`. Here every spelling is read, the nearest to the caller first. Without a batch size
# in the configuration it is unknown, not 32. A value that is not a whole number above 0 raises.

Config: TypeAlias = Mapping[str, Any]

_NO_ACCUMULATION = "gradient accumulation is unknown, and so are the tokens of a step"
_PROFILE_FREQ = 500
_ARGUMENT = "the argument flops_profile_freq"
_PROFILE_KEYS = (
    "monitoring.flops_profile_freq",
    "monitor.freq.flops_profile_freq",
    "monitor.flops_profile_freq",
)
_ACCUMULATION_KEYS = tuple(
    f"{section}gradient_accumulation_steps" for section in ("deepspeed.", "training.", "")
)
# The original's intervals in steps; and keys of the original that are accepted but not used.
_FREQUENCIES = {"training_log_freq": 10, "perf_log_freq": 10, "local_save_freq": 200}
_UNUSED = ("gpu_log_freq", "progress_update_freq", "eval_log_freq")
_MONITOR_KEYS = (*_PROFILE_KEYS, *(f"monitor.freq.{name}" for name in (*_FREQUENCIES, *_UNUSED)))


@dataclass(frozen=True, slots=True)
class MonitorSettings:
    """The monitor's settings. None: not in the configuration. UsageError for a wrong value."""

    flops_profile_freq: int
    flops_profile_freq_from: str
    freq: Mapping[str, int]
    micro_steps: int  # forward passes a step: gradient accumulation
    unread: str  # why DeepSpeed's configuration could not be read, if it could not
    no_tokens: str  # and why the tokens of a step are unknown for that
    batch_size: int | None  # sequences of a step, of all ranks
    batch_size_from: str
    seq_length: int | None
    wandb: Config

    @classmethod
    def of(
        cls, config: Config | None, *, flops_profile_freq: int | None, world: int
    ) -> MonitorSettings:
        """Read a configuration. An argument overrides it."""
        if config is not None and not isinstance(config, Mapping):
            raise UsageError(f"config is {config!r}: it must be a mapping, such as a loaded YAML")
        _check_sections(config)
        deepspeed, unread = _deepspeed(_at(config, "deepspeed"))
        config = {**_mapping(config), "deepspeed": deepspeed, _ARGUMENT: flops_profile_freq}
        profile_freq, source = _number_at(config, _ARGUMENT, *_PROFILE_KEYS)
        accumulation, _ = _number_at(config, *_ACCUMULATION_KEYS)
        micro_steps = accumulation or 1
        micro, _ = _number_at(config, "deepspeed.train_micro_batch_size_per_gpu")
        batch, batch_from = _number_at(config, "deepspeed.train_batch_size")
        if batch is None and micro is not None:
            batch = micro * micro_steps * world
            batch_from = f"deepspeed: {micro} x {micro_steps} x {world} ranks"
        elif batch is None:
            batch, batch_from = _number_at(config, "train_batch_size", otherwise=unread)
        return cls(
            flops_profile_freq=profile_freq or _PROFILE_FREQ,
            flops_profile_freq_from=source or "the default",
            freq={
                name: _number_at(config, f"monitor.freq.{name}")[0] or usual
                for name, usual in _FREQUENCIES.items()
            },
            micro_steps=micro_steps,
            unread=unread,
            no_tokens=f"{_NO_ACCUMULATION}: {unread}" if unread and accumulation is None else "",
            batch_size=batch,
            batch_size_from=batch_from or "not in the configuration",
            seq_length=_number_at(config, "model.max_sequence_length")[0],
            wandb=_mapping(config.get("wandb")),
        )


def _check_sections(config: Config | None) -> None:
    """Warn of keys in the monitor's sections that are not read. UsageError for no mapping."""
    for section in ("monitoring", "monitor", "monitor.freq"):
        keys = _at(config, section)
        if not isinstance(keys, Mapping | None):
            raise UsageError(f"{section} is {keys!r}: it must be a mapping of options")
        for key in (f"{section}.{name}" for name in keys or ()):
            if key not in (*_MONITOR_KEYS, "monitor.freq") and _rank() == 0:
                near = closest(key, _MONITOR_KEYS, cutoff=0)
                warn_once(f"config: {key} is not read; the nearest key that is: {near}")


def _number_at(config: Config, *keys: str, otherwise: str = "") -> tuple[int | None, str]:
    """The number at the first of these keys that is set, and that key; else None."""
    for key in keys:
        if (value := _at(config, key)) is not None:
            return _whole_number(value, key), key
    return None, otherwise


def _whole_number(value: Any, key: str) -> int:  # noqa: ANN401  any JSON value
    """The value, or its text, as an integer of 1 or more. UsageError for anything else."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(value, bool) and float(value) == int(value) >= 1:
            return int(value)
    raise UsageError(f"{key} is {value!r}: it must be a whole number of 1 or more")


def _deepspeed(section: object) -> tuple[Config, str]:
    """DeepSpeed's own configuration, without values of "auto"; or why it can't be read.

    `section` is the configuration itself, or the path of its JSON file.
    """
    loaded = section
    try:
        if isinstance(section, str | Path):
            loaded = json.loads(Path(section).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {}, f"{section} can't be read: {reason_of(error)}"
    if isinstance(loaded, Mapping):
        return {key: value for key, value in loaded.items() if value != "auto"}, ""
    return {}, "" if section is None else f"{section!r}: neither a mapping nor a JSON file with one"


def _at(config: object, key: str) -> Any:  # noqa: ANN401  any JSON value
    node: Any = config
    for part in key.split("."):
        node = _mapping(node).get(part)
    return node


def _mapping(value: object) -> Config:
    return value if isinstance(value, Mapping) else {}


# -- rows in W&B -----------------------------------------------------------------------------------
# A missing value is left out of the row: 0 would lower every mean.

_AXIS = "step"
_PROJECT = "qwen_classification"  # the original's default


class WandbRows(Guarded):
    """Sends rows to the script's W&B run where it has one, else to a new one.

    An error of wandb stops the rows, and nothing else.
    """

    stops = "no rows to W&B"

    def __init__(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._run: Any = None
        self._is_own = False
        if settings.get("enabled", False):
            self._open(settings, config)

    @guarded
    def _open(self, settings: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        import wandb  # noqa: PLC0415  only for those who ask

        self._is_own = wandb.run is None
        self._run = wandb.run or wandb.init(
            project=settings.get("project", _PROJECT),
            name=settings.get("run_name"),
            tags=list(settings.get("tags") or []),
            notes=settings.get("notes"),
            config=dict(config),
            resume="allow",
        )
        self._run.define_metric(_AXIS)
        for group in ("training/*", "perf/*", "eval/*"):
            self._run.define_metric(group, step_metric=_AXIS)

    @guarded
    def log(self, values: Mapping[str, Any], *, step: int | None = None) -> None:
        """Add values to the row of a step. None values are left out."""
        if self._run is None:
            return
        row = {name: value for name, value in values.items() if value is not None}
        if (number := _int(step)) is not None:
            row[_AXIS] = number
        self._run.log(row, step=number)

    @guarded
    def finish(self) -> None:
        """End the W&B run, if it was made here."""
        run, self._run = self._run, None
        if run is not None and self._is_own:
            run.finish()


# -- training_log.json -----------------------------------------------------------------------------
# The file is complete and valid at any time. Steps are appended, one a line, to
# `training_log.steps.jsonl`; the document is rebuilt from it under another name and renamed. That
# happens only when it has grown by a tenth, so all rebuilds together write about eleven times its
# size. Only the newest steps stay in memory.

RECENT_STEPS = 1000  # of the newest steps, in memory
_GROWN_FRAC = 0.1


class TrainingLog(Guarded):
    """Writes training_log.json and its steps file. Files of an earlier training are moved aside.

    If the disk fails, it prints one line and writes no more.
    """

    def __init__(self, path: Path, *, save_every: int) -> None:
        self.path = path
        self.stops = f"no training log from here on: {path} can't be written"
        self.steps_path = path.with_name(f"{path.stem}.steps.jsonl")
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT_STEPS)
        self.epochs: list[dict[str, Any]] = []
        self._save_every = save_every
        self._steps: IO[str] | None = None
        self._count = 0
        self._saved = 0

    @guarded
    def prepare(self) -> None:
        """Make the folder, and check that files can be made in it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=self.path.parent).close()

    @guarded
    def append(self, entry: dict[str, Any]) -> None:
        """Append a step's entry to the steps file."""
        self.recent.append(entry)
        self._open().write(_line(entry))
        self._count += 1

    @guarded
    def save_if_due(self, total_s: float) -> None:
        """Rebuild the document if it has grown enough."""
        grown = self._count - self._saved
        if grown >= max(self._save_every, _GROWN_FRAC * self._saved):
            self.save(total_s)

    @guarded
    def save(self, total_s: float) -> None:
        """Rebuild the document: every step and epoch, and the elapsed time."""
        self._open()
        with replacing(self.path) as part, part.open("w", encoding="utf-8") as out:
            out.write('{\n"step_logs": [')
            with self.steps_path.open(encoding="utf-8") as lines:
                first = lines.readline()
                out.write(f"\n{first.rstrip()}" if first else "")
                for line in lines:
                    out.write(f",\n{line.rstrip()}")
            epochs = ",\n".join(_line(epoch).rstrip() for epoch in self.epochs)
            out.write(
                f'\n],\n"epoch_logs": [\n{epochs}\n],\n"total_training_time": {total_s}\n}}\n'
            )
        self._saved = self._count

    @guarded
    def close(self) -> None:
        """Close the steps file."""
        if self._steps is not None:
            self._steps.close()

    def _open(self) -> IO[str]:
        if self._steps is None:
            for path in (self.path, self.steps_path):
                if path.exists():
                    shutil.move(path, _free_name(path))
            self._steps = self.steps_path.open("w", buffering=1, encoding="utf-8")  # line by line
        return self._steps


def _free_name(path: Path) -> Path:
    numbers = (path.with_name(f"{path.name}.{number}") for number in range(1, 1_000_000))
    return next(name for name in numbers if not name.exists())


def _line(entry: dict[str, Any]) -> str:
    """An entry as a line of JSON: non-finite values are null, with their text in `not_finite`."""
    odd = {n: str(v) for n, v in entry.items() if isinstance(v, float) and not math.isfinite(v)}
    if odd:
        entry = {**entry, **dict.fromkeys(odd), "not_finite": odd}
    return json.dumps(entry, ensure_ascii=False) + "\n"


# -- tokens of a step ------------------------------------------------------------------------------
# The mask of a logged step is that of this rank's last micro-batch. Every micro-batch and every
# rank is assumed to have as many tokens; this is exact where there is one of each.


@dataclass(frozen=True, slots=True)
class Masked:
    """Token sums of a mask, which may still be on a device."""

    rows: int = 0
    computed: int = 0
    real: Any = 0
    squares: Any = 0  # sum over rows of their length squared: the cost of attention
    fetch: Fetch | None = None
    absent: str = ""  # why there are no sums

    @classmethod
    def of(cls, mask: Any, *, fetched: bool) -> Masked:  # noqa: ANN401  a tensor, array or list
        """The sums of a mask, if it has rows of tokens. `fetched`: copy them from the device."""
        if mask is None:
            return cls(absent="no attention_mask was given to log_step: its tokens are unknown")
        with suppress(TypeError, ValueError, RuntimeError):
            mask = torch.tensor(mask) if isinstance(mask, list | tuple) else mask
        shape = tuple(getattr(mask, "shape", ()))
        if not 1 <= len(shape) <= 2 or 0 in shape:
            what = " ".join(f"{mask!r:.60}".split())
            return cls(absent=f"attention_mask is {what}, not rows of 0 and 1 of equal length")
        rows, length = (1, int(shape[0])) if len(shape) == 1 else (int(shape[0]), int(shape[1]))
        lengths = (mask != 0).sum(-1)
        real, squares = lengths.sum(), (lengths * lengths).sum()
        if getattr(getattr(mask, "device", None), "type", "cpu") == "cpu":
            return cls(rows, rows * length, int(real), int(squares), None)
        fetch = Fetch([real, squares], device_events([real])).start() if fetched else None
        return cls(rows, rows * length, real, squares, fetch)

    def counts(self, micro_steps: int) -> Counts:
        """The counts of a step of so many equal micro-batches, for a `Training`."""
        each = (self.computed, self.rows, self.real, self.squares)
        computed, rows, real, squares = (micro_steps * amount for amount in each)
        return Counts(computed, samples=rows, real=real, loss=None, squares=squares)

    @property
    def is_here(self) -> bool:
        """True if the sums can be read without waiting."""
        return self.fetch is None or self.fetch.is_here

    def sums(self) -> tuple[int, int]:
        """Real tokens, and the sum of squared lengths."""
        if self.absent:
            raise NotMeasurable(self.absent)
        real, squares = self.fetch.values() if self.fetch else (self.real, self.squares)
        if not int(real):
            raise NotMeasurable("the attention_mask masks every token")
        return int(real), int(squares)


# -- the monitor -----------------------------------------------------------------------------------


class TrainingMonitor(Guarded):
    """Writes every step to a run, to training_log.json and, on request, to W&B."""

    def __init__(
        self,
        output_dir: str | Path,
        config: Mapping[str, Any] | None = None,
        log_file: str = "training_log.json",
        flops_profile_freq: int | None = None,
        model: nn.Module | None = None,
        *,
        dtype: str | None = None,
        peak_flops_per_s: float | None = None,
    ) -> None:
        """`model` is needed for MFU. `dtype` is the precision of matrix products, for fp32 weights.

        `peak_flops_per_s` is the dense peak of one device, if the table of peaks lacks it.
        UsageError for a wrong option.
        """
        if model is not None:
            knowledge(model)  # raises for a wrong type
        self.config: Mapping[str, Any] = config if config is not None else {}
        self.settings = MonitorSettings.of(
            config, flops_profile_freq=flops_profile_freq, world=world_size()
        )
        self.flops_profile_freq = self.settings.flops_profile_freq
        self.freq = dict(self.settings.freq)
        self.batch_size = self.settings.batch_size
        self.seq_length = self.settings.seq_length
        self.model_ref = model
        self.log_file = str(Path(output_dir) / log_file)
        self._log = TrainingLog(Path(self.log_file), save_every=self.freq["local_save_freq"])
        self._training = Training(dtype=dtype, peak_flops_per_s=peak_flops_per_s)
        self._dtype = dtype
        self._peak: Amount | None = peak_flops_per_s
        self._counted = ""  # how FLOPs were counted
        # Logged steps until their tokens are here: entry, mask, and whether W&B gets no row.
        self._waiting: deque[tuple[dict[str, Any], Masked, bool]] = deque()
        self._start_ns: int | None = None  # of the step under way, where it is known
        self._holds_evaluation = False  # the step under way
        self._began_s: float | None = None
        self._run_path: Path | None = None
        self._last_step: int | None = None
        self._is_first = _rank() == 0
        self._rows = WandbRows(self.settings.wandb if self._is_first else {}, self.config)
        self.use_wandb = self._rows._run is not None and not self._rows.failed
        if self._is_first and (unread := self.settings.unread):
            warn_once(f"deepspeed: {self.settings.no_tokens or unread}")
        if self._is_first:
            self._log.prepare()
            batch, freq = self.settings.batch_size_from, self.settings.flops_profile_freq_from
            say(
                f"📊 TrainingMonitor初始化: batch_size={self.batch_size} ({batch}),"
                f" flops_profile_freq={self.flops_profile_freq} ({freq})\n"
            )
        atexit.register(self.save_logs)

    # -- what a loop calls ------------------------------------------------------------------------

    def set_model_ref(self, model: nn.Module) -> None:
        """Set the model whose MFU is computed."""
        self.model_ref = model
        if self._training.meter is not None:
            self._training.trains(model)

    @guarded
    def start_training(self) -> None:
        """The first step begins here. Without this call its duration is unknown."""
        self._begin()
        self._next_step()

    @guarded
    def log_step(
        self,
        step: int,
        epoch: int,
        loss: float,
        grad_norm: float,
        learning_rate: float,
        attention_mask: Any = None,  # noqa: ANN401  a tensor, or an array
        skip_wandb: bool = False,
        *,
        real_time_flops: float | None = None,
    ) -> None:
        """Log an optimizer step that has just ended. It began at the end of the last call."""
        end_ns = time.monotonic_ns()
        self._begin()
        number = _int(step)
        if number is None or number < 0:
            message = f"log_step: step is {step!r}, must be 0 or more: such steps are not logged"
            warn_once(message, about="log_step")
            self._next_step()
            return
        why = self.settings.no_tokens
        masked = Masked(absent=why) if why else Masked.of(attention_mask, fetched=self._is_first)
        entry: dict[str, Any] = {"step": number, "epoch": _int(epoch), "loss": _float(loss)}
        entry |= {"grad_norm": _float(grad_norm), "learning_rate": _float(learning_rate)}
        step_s = None
        if self._start_ns is not None:  # else its beginning, and so its duration, is unknown
            micro_steps = self.settings.micro_steps
            counts = [] if masked.absent else [masked.counts(micro_steps)]
            self._training.stepped(self._start_ns, end_ns, counts, micro_steps=micro_steps)
            self._training.logged({n: entry[n] for n in ("loss", "learning_rate", "grad_norm")})
            step_s = None if self._holds_evaluation else (end_ns - self._start_ns) / 1e9
        entry |= {"step_time": step_s, "timestamp": time.time()}
        if real_time_flops is not None:
            entry["real_time_flops"] = _float(real_time_flops)
        self._last_step = number
        self._waiting.append((entry, masked, skip_wandb))
        self._settle()
        if self._is_first:
            self._log.save_if_due(self._total_s)
        self._next_step()

    @guarded
    def log_epoch(
        self, epoch: int, avg_loss: float, elapsed_time: float, current_step: int | None = None
    ) -> None:
        """Log an epoch that has just ended."""
        self._settle()
        entry = {"epoch": _int(epoch), "avg_loss": _float(avg_loss)}
        entry |= {"elapsed_time": _float(elapsed_time), "timestamp": time.time()}
        self._log.epochs.append(entry)
        values = {"training/epoch_avg_loss": entry["avg_loss"], "training/epoch_number": epoch}
        values["training/epoch_time"] = entry["elapsed_time"]
        self._rows.log(values, step=current_step)
        self.save_logs()

    @guarded
    def log_evaluation(
        self,
        step: int,
        eval_loss: float,
        eval_accuracy: float | None = None,
        additional_metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Log an evaluation. After `log_step` of the same step, its time belongs to no step."""
        self._settle()
        if self._start_ns is not None and step == self._last_step:
            self._training.phase_over("eval", self._start_ns)
            self._next_step()
        else:
            self._holds_evaluation = True
        values: dict[str, Any] = {"eval/overall_loss": _float(eval_loss)}
        values["eval/overall_accuracy"] = _float(eval_accuracy)
        for name, value in (additional_metrics or {}).items():
            values[name if name.startswith("eval/") else f"eval/{name}"] = value
        self._rows.log(values, step=step)

    @guarded
    def log_metrics(
        self, metrics: Mapping[str, Any], step: int | None = None, commit: bool = True
    ) -> None:
        """Send any values to W&B."""
        del commit  # a row ends where the next step's begins
        self._settle()
        self._rows.log(metrics, step=step)

    @guarded
    def save_logs(self) -> None:
        """Write training_log.json. It is also written periodically and at exit."""
        self._settle(wait=True)
        if self._is_first and (self._last_step is not None or self._log.epochs):
            self._log.save(self._total_s)

    @guarded
    def finish_training(self) -> None:
        """End the training: write and close everything."""
        self.save_logs()
        self._rows.log({"training/total_time": self._total_s})
        self._rows.finish()
        self._training.end()
        self._log.close()
        atexit.unregister(self.save_logs)
        self.enabled = False

    close = finish_training

    # -- what comes of it -------------------------------------------------------------------------

    @property
    def run_path(self) -> Path | None:
        """The run directory, once it has begun: `erg report` shows it."""
        return self._run_path

    @property
    def step_logs(self) -> list[dict[str, Any]]:
        """The newest thousand steps; training_log.json has them all."""
        return list(self._log.recent)

    @property
    def epoch_logs(self) -> list[dict[str, Any]]:
        """Every epoch."""
        return self._log.epochs

    def get_latest_metrics(self) -> dict[str, Any] | None:
        """The newest step."""
        return self._log.recent[-1] if self._log.recent else None

    def get_avg_metrics(self, last_n_steps: int = 100) -> dict[str, Any]:
        """Means over the newest steps that have each value."""
        recent = self.step_logs[-last_n_steps:]
        means: dict[str, Any] = {}
        for name in ("loss", "grad_norm", "step_time", "mfu"):
            values = [entry[name] for entry in recent if entry.get(name) is not None]
            if values:
                means[f"avg_{name}"] = sum(values) / len(values)
        return {**means, "num_steps": len(recent)} if recent else {}

    # -- inside -----------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Print that a call failed, once for each class of error. Later calls are still logged."""
        message = f"TrainingMonitor: a call was not logged: {reason_of(error)} (printed once)"
        warn_once(message, about=f"TrainingMonitor {type(error).__name__}")
        self._start_ns = None  # the call may have begun or ended a step

    @property
    def _total_s(self) -> float:
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def _begin(self) -> None:
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._training.begin(self.model_ref)
            meter = self._training.meter
            self._run_path = meter.path if meter is not None else None
            if self.settings.micro_steps > 1:
                self._training.mark(
                    "assumed",
                    f"the {self.settings.micro_steps} micro-batches of a step have as many tokens"
                    " as the one whose mask was logged",
                )

    def _next_step(self) -> None:
        """Start the next step's clock, last: the cost of logging is in no step."""
        self._holds_evaluation = False
        self._start_ns = time.monotonic_ns()

    def _settle(self, *, wait: bool = False) -> None:
        """Log the waiting steps whose token counts have arrived, in order."""
        while self._waiting:
            entry, masked, skip_wandb = self._waiting[0]
            if not (wait or masked.is_here):
                return
            self._waiting.popleft()
            if self._is_first:
                self._finish(entry, masked, skip_wandb=skip_wandb)

    def _finish(self, entry: dict[str, Any], masked: Masked, *, skip_wandb: bool) -> None:
        figures = self._figures(entry["step_time"], masked)
        values = {n: None if isinstance(v, Missing) else v for n, v in figures.items()}
        step = entry["step"]
        entry |= {name: values.get(name) for name in ("mfu", "tokens_per_second")}
        self._log.append(entry)
        if step % self.flops_profile_freq == 0:
            mfu = figures["mfu"]
            if isinstance(mfu, Missing):
                shown_mfu = f"- ({mfu.reason})"
            else:
                mark = " (impossible: above 1)" if mfu > BOUND_TOLERANCE else ""
                shown_mfu = f"{mfu:.4f}{mark} (FLOPs {self._counted}; no profiler was run)"
            say(f"🔍 步骤 {step}: MFU = {shown_mfu}\n")
        row: dict[str, Any] = {}
        if not skip_wandb and step % self.freq["training_log_freq"] == 0:
            row |= {f"training/{name}": entry[name] for name in ("loss", "epoch", "grad_norm")}
            row["training/lr"] = entry["learning_rate"]
        if not skip_wandb and step % self.freq["perf_log_freq"] == 0:
            row |= {f"perf/{name}": value for name, value in values.items()}
        if row:
            self._rows.log(row, step=step)

    def _figures(self, step_s: float | None, masked: Masked) -> dict[str, Amount]:
        """The perf/ metrics of a step by name; Missing with its reason where unknown.

        The original divided the FLOPs of one micro-batch by the time of all, took a forward pass
        for a step, and mixed one rank's batch with all ranks' time. Here everything belongs to one
        optimizer step: FLOPs and their rate of this rank's device, tokens and samples of all ranks.
        """
        if step_s is None or step_s <= 0:
            absent = Missing("the duration of this step is unknown")
            return dict.fromkeys(("step_time", "mfu", "tokens_per_second"), absent)
        figures: dict[str, Amount] = {"step_time": step_s, "steps_per_second": 1 / step_s}
        micro_steps, world = self.settings.micro_steps, world_size()
        if rows := masked.rows * micro_steps * world or self.batch_size:
            figures["samples_per_second"] = rows / step_s
        try:
            real, squares = masked.sums()
            tokens = real * micro_steps
            figures["tokens_per_second"] = tokens * world / step_s
            figures["actual_seq_length"] = real / masked.rows
            if self.model_ref is None:
                raise NotMeasurable("no model was given: TrainingMonitor(..., model=model)")
            facts = knowledge(self.model_ref)
            # Attention grows with the square of the length: take the mean weighted by tokens.
            flops = tokens * facts.token_flops(self.model_ref, squares / real)
            self._counted = facts.counted
            figures |= {"actual_flops": flops, "flops_per_second": flops / step_s}
            mfu = flops / step_s / self._peak_flops_per_s()
        except Exception as error:  # noqa: BLE001  whatever the model is: the step is logged
            absent = Missing(reason_of(error))
            return {"tokens_per_second": absent, "mfu": absent, **figures}
        return {**figures, "mfu": mfu, "mfu_percent": 100 * mfu}

    def _peak_flops_per_s(self) -> float:
        """The peak of this rank's device, looked up once."""
        if self._peak is None:
            self._peak = or_missing(self._lookup_peak)
        return present(self._peak)

    def _lookup_peak(self) -> float:
        dtype = self._dtype or (knowledge(self.model_ref).dtype if self.model_ref else None)
        if dtype is None:
            warn_once("weights in fp32: matrix products are assumed to be in bf16; pass dtype=")
        return _peak_of(None, dtype or "bf16")


def _rank() -> int:
    rank, launched = own_rank(), os.environ.get("RANK", "0")
    return rank if rank is not None else int(launched) if launched.isdigit() else 0


def _float(value: Any) -> float | None:  # noqa: ANN401  a number, or what holds one
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


def _int(value: Any) -> int | None:  # noqa: ANN401  a number, or what holds one
    number = _float(value)
    return math.floor(number) if number is not None and math.isfinite(number) else None


# -- functions -------------------------------------------------------------------------------------

_facts_of_models: WeakKeyDictionary[nn.Module, _ModelFacts] = WeakKeyDictionary()
_warned: set[str] = set()
_SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16"}  # fp32 does not imply fp32 products


def calculate_mfu_with_profiler(
    model: nn.Module,
    batch_size: int,
    seq_length: int,
    step_time: float,
    *,
    dtype: str | None = None,
    peak_flops_per_s: float | None = None,
) -> float:
    """MFU of a training step of `batch_size` sequences on one device, in `step_time` seconds.

    nan where the FLOPs or the device's peak are not known; above 1 if an input is wrong. `dtype` is
    the precision of matrix products (bf16, fp16, tf32, fp32, ...); left out, it is that of the
    weights. With fp32 weights, bf16 (autocast) is then assumed, with one warning.
    `peak_flops_per_s` is the dense peak to divide by, instead of the table's.
    """
    batch_size = _whole_number(batch_size, "batch_size")
    seq_length = _whole_number(seq_length, "seq_length")
    if not 0 < (_float(step_time) or 0) < math.inf:
        raise UsageError(f"step_time must be seconds above 0; got {step_time!r}")
    Settings(peak_flops_per_s=peak_flops_per_s)  # which checks it
    try:
        facts = knowledge(model)
        flops = batch_size * facts.sequence_flops(model, seq_length)
    except ErgmeterError as error:
        return _unknown(f"no MFU: {error}")
    peak = peak_flops_per_s or get_gpu_peak_flops(dtype=dtype or facts.dtype or "bf16")
    if dtype is None and facts.dtype is None and not (peak_flops_per_s or math.isnan(peak)):
        _warn_once(
            "weights in fp32: matrix products are assumed to be in bf16 (autocast); pass dtype="
        )
    return flops / step_time / peak


def get_gpu_peak_flops(device: int | str | None = None, *, dtype: str = "bf16") -> float:
    """Dense peak of a GPU in FLOP/s, by its driver's name; nan if unknown."""
    try:
        return _peak_of(device, dtype)
    except ErgmeterError as error:
        return _unknown(str(error))


def _peak_of(device: int | str | None, dtype: str) -> float:
    if device is None or isinstance(device, int):
        if not torch.cuda.is_available():
            raise NotMeasurable("no CUDA device here, so no known peak; pass peak_flops_per_s=")
        device = torch.cuda.get_device_name(device)
    return table_peak(device, dtype).flops_per_s


class _ModelFacts:
    """A model's FLOPs per sequence by length, valid while the same parameters are trained.

    Walking through a model's modules takes a millisecond, so its parameters are cached. `knowledge`
    makes new facts if parameters were frozen since, as when an adapter is added.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self.trained = self.now_trained()
        self._flops: dict[int, float] = {}
        self.counted = ""  # how the FLOPs were counted, once they were
        dtypes = {parameter.dtype for parameter in self._parameters}
        self.dtype = next((_SHORT[dtype] for dtype in _SHORT if dtype in dtypes), None)

    def sequence_flops(self, model: nn.Module, seq_length: int) -> float:
        """FLOPs of a sequence of this length, counted once and cached."""
        if seq_length not in self._flops:
            self._flops[seq_length], self.counted = _sequence_flops(model, seq_length)
        return self._flops[seq_length]

    def token_flops(self, model: nn.Module, length: float) -> float:
        """FLOPs per token, interpolated between the powers of two around the length.

        This is exact with full attention, where FLOPs per token grow linearly with the length. So
        few lengths are ever counted, whatever lengths a training has.
        """
        below = 1 << math.floor(math.log2(max(1.0, length)))
        low = self.sequence_flops(model, below) / below
        if length <= below:
            return low
        try:
            high = self.sequence_flops(model, 2 * below) / (2 * below)
        except ErgmeterError:  # more positions than the model has
            exact = round(length)
            return self.sequence_flops(model, exact) / exact
        return low + (high - low) * (length - below) / below

    def now_trained(self) -> int:
        """The number of parameter tensors that require gradients now; freezing changes it."""
        return sum([parameter.requires_grad for parameter in self._parameters])


def knowledge(model: nn.Module) -> _ModelFacts:
    """The cached facts of a model: FLOPs by length, and the dtype of its weights."""
    if not callable(getattr(model, "parameters", None)):
        raise UsageError(f"model is {model!r:.80}, not a torch.nn.Module")
    facts = _facts_of_models.get(model)
    if facts is None or facts.now_trained() != facts.trained:
        facts = _facts_of_models[model] = _ModelFacts(model)
    return facts


def _sequence_flops(model: nn.Module, seq_length: int) -> tuple[float, str]:
    """The FLOPs of a sequence, and how they were counted."""
    try:
        work, _ = model_work(model, seq_length)
    except ErgmeterError:  # no configuration, or a family that is not known: run it
        flops = count(model, batch_size=1, seq_len=seq_length).needed.model
        return flops, "counted on tensors without memory"
    return work.chosen.model_per_step, "of the model's configuration"


def _unknown(why: str) -> float:
    _warn_once(why)
    return math.nan


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)

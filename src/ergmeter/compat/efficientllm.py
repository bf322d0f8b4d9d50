"""EfficientLLM's metrics module under its original names: only the import line changes.

    from ergmeter.compat.efficientllm import (
        initialize_efficientllm_metrics, finalize_efficientllm_metrics, get_metrics_collector,
        should_log_metrics,
    )

The original kept a thousand iteration times and an unbounded token sum, so that TT and ST read ten
times too high after ten thousand iterations. It read device 0 on every rank, and reported 0 for
what it could not measure. Here iterations go to a run on disk, and every metric is over that run
from its first iteration (`metrics.live.totals`), absent where unknown. The history size limits
memory only; no metric is computed from the history.

Nothing here raises into a training. docs/from-efficientllm.md explains the calls and
where values differ from the original's.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from functools import partialmethod
from typing import TYPE_CHECKING, Any, TypeAlias

from ergmeter.errors import UsageError
from ergmeter.integrations.guard import Guarded, guarded, reason_of, say, warn_once
from ergmeter.meter import Meter, active_meters
from ergmeter.records import Missing, Step, or_missing
from ergmeter.runlog.process_group import world_size

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.integrations.profiling import Profile
    from ergmeter.metrics.live.totals import Amount, RunningTotals, Totals

# -- metrics from a run's totals -------------------------------------------------------------------
# The console block and the TensorBoard names are those of EfficientLLM's documentation. A missing
# metric has its reason in the block and no point in TensorBoard; the original wrote 0.
#
# AL, TT and ST are over the time inside iterations, as their formulas say (TT x parameters x AL is
# the tokens of an iteration). AMU, PCU and AEC are over the wall clock from the first iteration to
# the last. The catalogue's tokens/s/param, which `erg report` shows, is over the wall clock too:
# evaluation and other time between iterations lowers it.

Figures: TypeAlias = "Mapping[str, Amount]"

# The documented lines: name in TensorBoard and in `get_all_metrics`, label and form on the console.
DOCUMENTED = (
    ("amu_gb", "AMU (GB)", ".2f"),
    ("pcu_ratio", "PCU (Ratio)", ".3f"),
    ("al_seconds", "AL (Seconds)", ".4f"),
    ("tt_tokens_per_param_per_sec", "TT (Tokens/Param/Sec)", ".2e"),
    ("st_samples_per_param_per_sec", "ST (Samples/Param/Sec)", ".2e"),
    ("aec_watts", "AEC (Watts)", ".2f"),
)
# Lines after the documented ones: energy, and AL's two parts, by the column of a profile that has
# their share. The parts overlap.
PARTS = {"computation": "compute_s", "communication": "communication_s"}
LINES = (
    *(*DOCUMENTED, ("energy_joules", "Energy (J)", ".1f")),
    *((f"al_{part}_seconds", f"AL {part} (Seconds)", ".4f") for part in PARTS),
)
IT = "it_tokens_per_sec"
ORIGINAL = (*(name for name, _, _ in DOCUMENTED), IT)  # the seven of its `get_all_metrics`
TAG = "efficientllm/"
_BYTES_PER_GB = 1e9


def absent(reason: str) -> dict[str, Amount]:
    """Every metric of the block, Missing for the same reason."""
    return {name: Missing(reason) for name, _, _ in LINES}


def figures(
    totals: Totals, parameters: int | None, computation_frac: Amount, communication_frac: Amount
) -> dict[str, Amount]:
    """The metrics of a run so far, in the order of the block.

    `parameters` is the model's size as declared; the two fractions are shares of AL.
    """
    size: Amount = float(parameters) if parameters else Missing(_NO_SIZE)
    per_parameter = size if isinstance(size, Missing) else size * totals.in_steps_s
    al_s = totals.in_steps_s / totals.steps
    return {
        "amu_gb": _over(totals.memory_byte_s, totals.window_s * _BYTES_PER_GB),
        "pcu_ratio": _over(totals.busy_s, totals.window_s),
        "al_seconds": al_s,
        "tt_tokens_per_param_per_sec": _over(_counted(totals.tokens, "tokens"), per_parameter),
        "st_samples_per_param_per_sec": _over(_counted(totals.samples, "samples"), per_parameter),
        "aec_watts": _over(totals.energy_j, totals.window_s),
        "energy_joules": totals.energy_j,
        "al_computation_seconds": _over(computation_frac, 1 / al_s),
        "al_communication_seconds": _over(communication_frac, 1 / al_s),
    }


_NO_SIZE = "the number of parameters was not given to initialize_efficientllm_metrics"


def block(head: str, loss: Amount, values: Figures) -> str:
    """The text printed per log: the documented lines, then energy and AL's two parts."""
    lines = [f"[EfficientLLM Metrics] {head}:", f"  Loss: {_text(loss, '.6f')}"]
    lines += [f"  {label}: {_text(values[name], form)}" for name, label, form in LINES]
    return "\n".join(lines) + "\n"


def scalars(values: Figures) -> dict[str, float]:
    """The six documented TensorBoard scalars by tag, without missing ones."""
    documented = ((name, values[name]) for name, _, _ in DOCUMENTED)
    return {f"{TAG}{name}": value for name, value in documented if not isinstance(value, Missing)}


def _text(amount: Amount, form: str) -> str:
    """A value, or its reason cut short, because the block is printed often."""
    if isinstance(amount, Missing):
        return f"- ({amount.reason.partition(' (')[0].partition('; ')[0]})"
    return format(amount, form)


def _counted(amount: Amount, what: str) -> Amount:
    """The amount, or Missing if it is 0: then nothing was counted."""
    return Missing(f"the iterations have 0 {what}") if amount == 0 else amount


def _over(amount: Amount, by: Amount) -> Amount:
    if isinstance(amount, Missing):
        return amount
    return by if isinstance(by, Missing) else amount / by


# -- the EFFICIENTLLM_* variables ------------------------------------------------------------------
# As in the original, only "true" enables: 1 and yes disable everything, here with a warning. An
# invalid number prints a warning too, and does not raise.

ENABLED = "EFFICIENTLLM_METRICS_ENABLED"
PROFILE_STEPS = "EFFICIENTLLM_PROFILE_STEPS"  # the original had none: for AL's two parts


def collection_interval_s() -> float:
    """The longest interval between device readings."""
    return _number("EFFICIENTLLM_COLLECTION_INTERVAL", 1.0)


def history_size() -> int:
    """The number of iteration times stored in memory."""
    return max(1, int(_number("EFFICIENTLLM_HISTORY_SIZE", 1000)))


def is_enabled() -> bool:
    """True only for "true", as in the original; other words print a warning."""
    value = os.environ.get(ENABLED, "true")
    if value.lower() not in ("true", "false"):
        warn_once(f"{ENABLED}={value} is neither true nor false: false is used; set it to true")
    return value.lower() == "true"


def _number(name: str, default: float) -> float:
    value = os.environ.get(name, "")
    try:
        number = float(value) if value else default
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and (number > 0 or number == default)):
        warn_once(f"{name}={value} is not a number above 0: {default:g} is used")
        return default
    return number


# -- the collector ---------------------------------------------------------------------------------

__all__ = [
    "EfficientLLMCollector", "EfficientLLMMetrics", "MetricsCollector",
    "finalize_efficientllm_metrics", "get_efficientllm_collector", "get_metrics_collector",
    "initialize_efficientllm_metrics", "model_compression_ratio", "should_log_metrics",
]  # fmt: skip

# What computing the block may cost: this share of the training's time, and a second to begin with.
# A loop that logs more often gets the last values again.
_LOOK_FRAC = 0.01
_LOOK_S = 1.0
_READ_EVERY_S = 0.1  # NVML is read so often anyway: an interval can only make it more often

_collector: MetricsCollector | None = None


class EfficientLLMMetrics(dict[str, float]):
    """Every metric by its TensorBoard name; the original's also as attributes `amu`, `pcu`, ..."""

    def __init__(self, values: Mapping[str, float]) -> None:
        super().__init__(values)
        vars(self).update((name.partition("_")[0], values[name]) for name in ORIGINAL)


def _calculated(collector: MetricsCollector, name: str) -> float:
    """The metric of this name over the run so far; nan if missing."""
    return float(getattr(collector.get_all_metrics(), name))


class MetricsCollector(Guarded):
    """Records one process's iterations in a run, and computes EfficientLLM's metrics from it."""

    def __init__(self, collection_interval: float = 1.0, history_size: int = 1000) -> None:
        self.enabled = is_enabled()
        self.collection_interval = collection_interval
        self.history_size = max(1, history_size)
        self.model_parameters: int | None = None
        self.sequence_length = self.batch_size = 0
        # The newest iteration times, as an attribute of the original.
        self.latency_history: deque[float] = deque(maxlen=self.history_size)
        self._meter: Meter | None = None
        self._is_own = False
        self._running: RunningTotals | None = None
        self._profile: Profile | None = None
        self._start_ns: int | None = None
        self._last: Step | None = None  # held back: the loss of an iteration is logged after it
        self._index = 0
        self._generated = self._generating_s = 0.0
        self._last_values: Figures = {}
        self._began_ns = time.monotonic_ns()
        self._looking_s = 0.0
        self._is_finalized = False

    # -- life -----------------------------------------------------------------------------------

    @guarded
    def start_collection(self) -> None:
        """Begin the run, unless it has begun. The first iteration does so too."""
        if self._meter is not None:
            return
        active_meters.make_way()
        others = active_meters.meters()
        self._is_own = not others
        self._meter = others[0] if others else self._own_meter()
        if steps := int(_number(PROFILE_STEPS, 0)):
            from ergmeter.integrations.profiling import Profile  # noqa: PLC0415  loads torch

            self._profile = Profile(self._meter, steps=steps)
            self._profile.reads_at_once = True
            self._profile.start()
        else:
            self._meter.mark("no_profile_yet", f"no steps were profiled: set {PROFILE_STEPS}=3")
        self.reset()

    @guarded
    def stop_collection(self) -> None:
        """End the run. Its metrics can still be read."""
        if self._meter is None or self._running is None:
            return
        self._let_go()
        if self._profile is not None:
            self._profile.stop()
        if self._is_own:
            self._meter.close()

    @guarded
    def reset(self) -> None:
        """Compute metrics only from here on. The run on disk continues, with a mark."""
        from ergmeter.metrics.live.totals import RunningTotals  # noqa: PLC0415  loads numpy and pyarrow

        self.latency_history.clear()
        self._generated = self._generating_s = 0.0
        handover = self._meter._handover if self._meter is not None else None
        if self._meter is None or handover is None:
            return
        self._let_go()
        since_ns = time.monotonic_ns() if self._running is not None else 0
        if self._running is not None:
            self._meter.mark("figures_reset")
        self._last_values = {}
        self._running = RunningTotals(handover._writer.id, since_ns=since_ns)

    def set_model_parameters(self, num_parameters: int) -> None:
        """Set the size of the model, which TT and ST divide by."""
        self.model_parameters = _whole_number(num_parameters)

    def set_batch_config(self, sequence_length: int, batch_size: int) -> None:
        """Set tokens and samples of iterations whose end is recorded without them."""
        self.sequence_length, self.batch_size = sequence_length, batch_size

    @property
    def run_path(self) -> Path | None:
        """The run directory: `erg report` shows it."""
        return self._meter.path if self._meter is not None else None

    # -- what a loop calls ------------------------------------------------------------------------

    @guarded
    def record_iteration_start(self) -> None:
        """Record the start of an iteration."""
        if self._meter is None:
            self.start_collection()
        if self._meter is None or self._meter._handover is None:
            return  # it could not begin, or is over
        self._let_go()
        self._start_ns = time.monotonic_ns()

    @guarded
    def record_iteration_end(
        self, tokens_processed: int | None = None, samples_processed: int | None = None
    ) -> None:
        """Record the end of an iteration, with this rank's tokens (padding included) and samples.

        Left out, they are those of `set_batch_config`, if it was called.
        """
        end_ns = time.monotonic_ns()
        if tokens_processed is None:
            tokens_processed = self.sequence_length * self.batch_size or None
        samples = self.batch_size or None if samples_processed is None else samples_processed
        start_ns, self._start_ns = self._start_ns, None
        if start_ns is None or end_ns <= start_ns:
            return
        self.latency_history.append((end_ns - start_ns) / 1e9)
        self._last = Step(
            start_ns, end_ns, self._index, tokens_computed=tokens_processed, samples=samples
        )
        self._index += 1
        if self._profile is not None:
            self._profile.step()  # which never raises

    record_step_start, record_step_end = record_iteration_start, record_iteration_end

    def should_log_metrics(self, iteration: int) -> bool:
        """True if this iteration is to be logged."""
        return should_log_metrics(iteration)

    def log_metrics(self, iteration: int, loss: Any = None, writer: Any = None) -> dict[str, float]:  # noqa: ANN401
        """Print the block, and pass the six scalars to a TensorBoard writer if given.

        Return the six scalars by tag; nan for missing ones.
        """
        missing = {f"{TAG}{name}": math.nan for name, _, _ in DOCUMENTED}
        return missing | (self._log(iteration, loss, writer) or {})

    @guarded
    def _log(self, iteration: int, loss: Any, writer: Any) -> dict[str, float]:  # noqa: ANN401
        value = _loss_value(loss)
        self._let_go(None if isinstance(value, Missing) else value)
        elapsed_s = (time.monotonic_ns() - self._began_ns) / 1e9
        if not self._last_values or self._looking_s < _LOOK_S + _LOOK_FRAC * elapsed_s:
            self._last_values = self._now()
        say(block(f"Iteration {iteration}", value, self._last_values))
        points = scalars(self._last_values)
        try:
            for tag, point in points.items() if writer is not None else ():
                writer.add_scalar(tag, point, iteration)
        except Exception as error:  # noqa: BLE001  the user's writer
            warn_once(f"the TensorBoard writer failed: {reason_of(error)}")
        return points

    def calculate_it(self, tokens_generated: float, total_inference_time: float) -> float:
        """IT (inference throughput) of one generation, in tokens/s.

        `get_all_metrics` has it over all generations. nan, with one warning, for values that are
        not numbers, tokens below 0 or a time of 0.
        """
        try:
            tokens, elapsed_s = float(tokens_generated), float(total_inference_time)
        except (TypeError, ValueError):
            tokens = elapsed_s = math.nan
        if not (0 < elapsed_s < math.inf and 0 <= tokens < math.inf):
            wrong = f"{tokens_generated!r} tokens in {total_inference_time!r} s"
            warn_once(f"calculate_it: {wrong} is not valid and not counted", about="IT")
            return math.nan
        self._generated += tokens
        self._generating_s += elapsed_s
        return tokens / elapsed_s

    calculate_amu, calculate_pcu, calculate_al, calculate_tt, calculate_st, calculate_aec = (
        partialmethod(_calculated, name) for name in ("amu", "pcu", "al", "tt", "st", "aec")
    )

    # -- what comes of it -------------------------------------------------------------------------

    def get_all_metrics(self) -> EfficientLLMMetrics:
        """Every metric by its TensorBoard name, with IT and energy. nan: see `why_missing`."""
        values = self._all()
        present = {name: value for name, value in values.items() if not isinstance(value, Missing)}
        return EfficientLLMMetrics(dict.fromkeys(values, math.nan) | present)

    def why_missing(self) -> dict[str, str]:
        """The reason for each nan in `get_all_metrics`, by name."""
        return {n: v.reason for n, v in self._all().items() if isinstance(v, Missing)}

    def _all(self) -> dict[str, Amount]:
        it: Amount = Missing("nothing was generated: calculate_it was not called")
        if self._generating_s:
            it = self._generated / self._generating_s
        return {**self._now(), IT: it}

    # -- inside -----------------------------------------------------------------------------------

    def _own_meter(self) -> Meter:
        interval_s = min(_READ_EVERY_S, self.collection_interval)
        options = {"nvml": {"period_s": interval_s}} if interval_s < _READ_EVERY_S else {}
        return Meter(parameters=self.model_parameters, probe_options=options).start()

    def _let_go(self, loss: float | None = None) -> None:
        last, self._last = self._last, None
        if last is not None and self._meter is not None:
            self._meter.record(last if loss is None else replace(last, loss=loss))

    def _now(self) -> dict[str, Amount]:
        """The metrics of the run as it is on disk now; Missing with the reason if that fails."""
        if not self.enabled or self.failed:
            return absent(self.failed or f"disabled by {ENABLED}")
        if self._meter is None or self._running is None:
            return absent("no iteration has been recorded")
        from ergmeter.metrics.definitions.profile import share_of  # noqa: PLC0415  loads numpy
        from ergmeter.runlog.reader import Run  # noqa: PLC0415  loads numpy and pyarrow

        before_s = time.perf_counter()
        try:
            self._let_go()
            if self._meter._handover is not None:
                self._meter._handover.flush()
            run = Run.open(self._meter.path)
            gpus = _own_gpus() or {gpu.id for gpu in run.devices.values() if gpu.kind == "gpu"}
            totals = self._running.totals(run, gpus=gpus)
            alone = None
            if world_size() == len(gpus) == 1 and not isinstance(totals.busy_s, Missing):
                alone = totals.busy_s / totals.window_s, totals.in_steps_s / totals.window_s
            shares = [or_missing(share_of, run, column, alone) for column in PARTS.values()]
            return figures(totals, self.model_parameters, *shares)
        except Exception as error:  # noqa: BLE001  the user's loop asks; a disk may work next time
            return absent(reason_of(error))
        finally:
            self._looking_s += time.perf_counter() - before_s


# -- the module's functions ------------------------------------------------------------------------


def initialize_efficientllm_metrics(
    model_parameters: int,
    collection_interval: float | None = None,
    sequence_length: int = 0,
    batch_size: int = 0,
) -> MetricsCollector:
    """Start collecting metrics; if the environment disables it, print that and do nothing."""
    global _collector
    if _collector is not None:
        _collector.stop_collection()
    interval_s = collection_interval or 0.0
    interval_s = interval_s if interval_s > 0 else collection_interval_s()
    _collector = MetricsCollector(interval_s, history_size())
    _collector.set_model_parameters(model_parameters)
    _collector.set_batch_config(sequence_length, batch_size)
    _collector.start_collection()
    if not _collector.enabled:
        say(f"[EfficientLLM] Metrics collection disabled via {ENABLED}=false\n")
    elif not _collector.failed:  # else it has printed why
        parameters = f"{_collector.model_parameters or 0:,} parameters"
        sizes = f"Collection interval: {interval_s}s, History size: {_collector.history_size}"
        say(
            f"[EfficientLLM] Metrics collection initialized for model with {parameters}\n"
            f"[EfficientLLM] {sizes}\n"
        )
    return _collector


def finalize_efficientllm_metrics() -> None:
    """End the run, and print where it is, once."""
    if _collector is None or not _collector.enabled or _collector._is_finalized:
        return
    _collector._is_finalized = True
    _collector.stop_collection()
    where = f"[EfficientLLM] erg report {_collector.run_path}\n" if _collector.run_path else ""
    say(f"[EfficientLLM] Metrics collection finalized\n{where}")


def get_metrics_collector() -> MetricsCollector:
    """The process's collector. Before `initialize_efficientllm_metrics` it has no parameter count;
    if disabled, it does nothing."""
    global _collector
    if _collector is None:
        _collector = MetricsCollector(collection_interval_s(), history_size())
    return _collector


EfficientLLMCollector = MetricsCollector  # LLaMA-Factory's names
get_efficientllm_collector = get_metrics_collector


def should_log_metrics(iteration: int) -> bool:
    """True for every EFFICIENTLLM_LOG_INTERVAL-th iteration; the variable is read at each call."""
    interval = max(1, int(_number("EFFICIENTLLM_LOG_INTERVAL", 10)))
    return is_enabled() and iteration % interval == 0


def model_compression_ratio(
    original_bytes: float,
    compressed_bytes: float,
    *,
    original_performance: float = 1.0,
    compressed_performance: float = 1.0,
) -> float:
    """MCR (model compression ratio): the ratio of sizes times the share of the score that remains.

    (size_original / size_compressed) x (performance_compressed / performance_original): equation 9
    of arXiv 2505.13840. Without scores it is the ratio of the sizes. A score must grow with
    quality: for a perplexity, pass the inverse.
    """
    sizes = (original_bytes, compressed_bytes, original_performance, compressed_performance)
    if not all(math.isfinite(size) for size in sizes) or min(sizes[:3]) <= 0 or sizes[3] < 0:
        raise UsageError(f"both sizes and the original's score must be above 0; got {sizes}")
    return original_bytes / compressed_bytes * (compressed_performance / original_performance)


def _own_gpus() -> set[str]:
    """UUIDs of the GPUs that this process has memory on; empty if torch uses no GPU."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return set()
    indices = [index for index in range(cuda.device_count()) if cuda.memory_reserved(index)]
    return {f"GPU-{getattr(cuda.get_device_properties(index), 'uuid', '')}" for index in indices}


def _loss_value(loss: Any) -> Amount:  # noqa: ANN401  a number, or what holds one
    if loss is None:
        return Missing("no loss was given")
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError) as error:
        return Missing(f"the loss is a {type(loss).__name__}, not a number: {error}")


def _whole_number(parameters: Any) -> int | None:  # noqa: ANN401  whatever a caller counted them to
    try:
        return int(parameters) or None
    except (TypeError, ValueError):
        warn_once(f"the parameter count {parameters!r} is not a number: TT and ST are absent")
        return None

"""TrainingMonitor: one line a step, and the run, training_log.json and W&B come of it.

    monitor = TrainingMonitor("./outputs", config, flops_profile_freq=500, model=model)
    for step in range(total_steps):
        ...
        monitor.log_step(step, epoch, loss, grad_norm, learning_rate, attention_mask)

The trap that shaped it: a monitor that is part of what it measures. The original ran a forward pass
of its own in eval mode, left the model so, and counted the time for it in the next step. Here a
step lasts from the end of one call to the start of the next, and FLOPs are known without running
anything. Nothing raises into the training.
"""

from __future__ import annotations

import atexit
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ergmeter.compat.training_monitor.functions import knowledge
from ergmeter.compat.training_monitor.log_file import TrainingLog
from ergmeter.compat.training_monitor.metrics import Masked, StepConstants, step_figures
from ergmeter.compat.training_monitor.settings import MonitorSettings
from ergmeter.compat.training_monitor.wandb_rows import WandbRows
from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.integrations.guard import Guarded, guarded, say, warn_once
from ergmeter.integrations.training import Training
from ergmeter.integrations.training_identity import world_size
from ergmeter.metrics.definitions.compute import table_peak
from ergmeter.records import BOUND_TOLERANCE, Missing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from ergmeter.metrics.live.totals import Amount


@dataclass(frozen=True, slots=True)
class _Logged:
    """A step that was logged, until its tokens are known."""

    entry: dict[str, Any]
    step_s: float | None
    masked: Masked | None
    skip_wandb: bool


class TrainingMonitor(Guarded):
    """Takes down every step: to a run, to training_log.json and, where it is asked to, to W&B."""

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
        """`model` gives MFU; `dtype` is what products are in, where its weights do not say.

        `peak_flops_per_s` is the dense peak of one device, where the table does not know it.
        """
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
        self._waiting: deque[_Logged] = deque()
        self._start_ns: int | None = None  # of the step under way, where it is known
        self._holds_evaluation = False  # the step under way
        self._began_s: float | None = None
        self._run_path: Path | None = None
        self._last_step: int | None = None
        self._is_first = _rank() == 0
        self._rows = WandbRows(self.settings.wandb if self._is_first else {}, self.config)
        self.use_wandb = self._rows.is_open
        if self._is_first:
            batch, freq = self.settings.batch_size_from, self.settings.flops_profile_freq_from
            say(
                f"📊 TrainingMonitor初始化: batch_size={self.batch_size} ({batch}),"
                f" flops_profile_freq={self.flops_profile_freq} ({freq})\n"
            )
        atexit.register(self.save_logs)

    # -- what a loop calls ------------------------------------------------------------------------

    def set_model_ref(self, model: nn.Module) -> None:
        """The model whose MFU it is."""
        self.model_ref = model
        if self._training.meter is not None:
            self._training.trains(model)

    @guarded
    def start_training(self) -> None:
        """The first step begins here. Without it, its time is not known and not made up."""
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
        """An optimizer step is over. It took from the end of the last call to the start of this."""
        end_ns = time.monotonic_ns()
        self._begin()
        masked = Masked.of(attention_mask, fetched=self._is_first)
        entry: dict[str, Any] = {
            "step": int(step),
            "epoch": int(epoch),
            "loss": _float(loss),
            "grad_norm": _float(grad_norm),
            "learning_rate": _float(learning_rate),
        }
        step_s = None
        if self._start_ns is not None:  # else nobody saw it begin, and it is not made up
            self._tell(self._start_ns, end_ns, entry, masked)
            step_s = None if self._holds_evaluation else (end_ns - self._start_ns) / 1e9
        entry |= {"step_time": step_s, "timestamp": time.time()}
        if real_time_flops is not None:
            entry["real_time_flops"] = float(real_time_flops)
        self._last_step = int(step)
        self._waiting.append(_Logged(entry, step_s, masked, skip_wandb))
        self._settle()
        if self._is_first:
            self._log.save_if_due(self._total_s)
        self._next_step()

    @guarded
    def log_epoch(
        self, epoch: int, avg_loss: float, elapsed_time: float, current_step: int | None = None
    ) -> None:
        """An epoch is over."""
        self._settle()
        found = {"epoch": int(epoch), "avg_loss": _float(avg_loss)}
        found |= {"elapsed_time": _float(elapsed_time), "timestamp": time.time()}
        self._log.epochs.append(found)
        values = {"training/epoch_avg_loss": found["avg_loss"], "training/epoch_number": epoch}
        values["training/epoch_time"] = found["elapsed_time"]
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
        """An evaluation is over. After `log_step` of the same step its time is no step's."""
        self._settle()
        if self._start_ns is not None and step == self._last_step:
            self._training.phase_over("eval", self._start_ns)
            self._next_step()
        else:
            self._holds_evaluation = True
        values: dict[str, Any] = {"eval/overall_loss": _float(eval_loss)}
        if eval_accuracy is not None:
            values["eval/overall_accuracy"] = _float(eval_accuracy)
        for name, value in (additional_metrics or {}).items():
            values[name if name.startswith("eval/") else f"eval/{name}"] = value
        self._rows.log(values, step=step)

    @guarded
    def log_metrics(
        self, metrics: Mapping[str, Any], step: int | None = None, commit: bool = True
    ) -> None:
        """Any figures, to W&B."""
        del commit  # a row ends where the next step's begins
        self._settle()
        self._rows.log(metrics, step=step)

    @guarded
    def save_logs(self) -> None:
        """Write training_log.json. It is written every so often, and at exit, by itself."""
        self._settle(wait=True)
        if self._is_first and self._last_step is not None:
            self._log.save(self._total_s)

    @guarded
    def finish_training(self) -> None:
        """The training is over: everything is written and closed."""
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
        """Means over the newest steps, each over those that have it; time over steps."""
        recent = self.step_logs[-last_n_steps:]
        found: dict[str, Any] = {}
        for name in ("loss", "grad_norm", "step_time", "mfu"):
            values = [entry[name] for entry in recent if entry.get(name) is not None]
            if values:
                found[f"avg_{name}"] = sum(values) / len(values)
        return {**found, "num_steps": len(recent)} if recent else {}

    # -- inside -----------------------------------------------------------------------------------

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
        """Last of all: what logging costs is in no step."""
        self._holds_evaluation = False
        self._start_ns = time.monotonic_ns()

    def _tell(
        self, start_ns: int, end_ns: int, entry: Mapping[str, Any], masked: Masked | None
    ) -> None:
        """To the run."""
        micro_steps = self.settings.micro_steps
        counts = [masked.counts(micro_steps)] if masked is not None else []
        self._training.stepped(start_ns, end_ns, counts, micro_steps=micro_steps)
        self._training.logged({n: entry[n] for n in ("loss", "learning_rate", "grad_norm")})

    def _settle(self, *, wait: bool = False) -> None:
        """Finish the steps whose tokens are known, in order."""
        while self._waiting:
            masked = self._waiting[0].masked
            if not (wait or masked is None or masked.is_here):
                return
            self._finish(self._waiting.popleft())

    def _finish(self, logged: _Logged) -> None:
        if not self._is_first:
            return
        place = StepConstants(
            self.settings.micro_steps,
            world_size(),
            self.batch_size,
            self._token_flops,
            self._peak_flops_per_s,
        )
        figures = step_figures(logged.step_s, logged.masked, place)
        known = {n: None if isinstance(v, Missing) else v for n, v in figures.items()}
        entry, step = logged.entry, logged.entry["step"]
        entry |= {name: known.get(name) for name in ("mfu", "tokens_per_second")}
        self._log.append(entry)
        if step % self.flops_profile_freq == 0:
            mfu = figures["mfu"]
            said = f"- ({mfu.reason})" if isinstance(mfu, Missing) else _marked_mfu(mfu)
            say(f"🔍 步骤 {step}: 使用profiler计算MFU = {said}\n")
        row = {} if logged.skip_wandb else self._row(step, entry, known)
        if row:
            self._rows.log(row, step=step)

    def _row(
        self, step: int, entry: Mapping[str, Any], known: Mapping[str, float | None]
    ) -> dict[str, Any]:
        row: dict[str, Any] = {}
        if step % self.freq["training_log_freq"] == 0:
            names = {
                "loss": "loss",
                "lr": "learning_rate",
                "epoch": "epoch",
                "grad_norm": "grad_norm",
            }
            row |= {f"training/{name}": entry[key] for name, key in names.items()}
        if step % self.freq["perf_log_freq"] == 0:
            row |= {f"perf/{name}": value for name, value in known.items()}
        return row

    def _token_flops(self, length: float) -> float:
        if self.model_ref is None:
            raise NotMeasurable("the model is not known: TrainingMonitor(..., model=model)")
        return knowledge(self.model_ref).token_flops(self.model_ref, length)

    def _peak_flops_per_s(self) -> Amount:
        """Of this rank's device, looked up once."""
        if self._peak is None:
            try:
                self._peak = self._looked_up()
            except ErgmeterError as error:
                self._peak = Missing(str(error))
        return self._peak

    def _looked_up(self) -> float:
        if not torch.cuda.is_available():
            raise NotMeasurable("no CUDA device here whose peak is known; pass peak_flops_per_s=")
        dtype = self._dtype or (knowledge(self.model_ref).dtype if self.model_ref else None)
        if dtype is None:
            warn_once("weights in fp32: products are taken to be in bf16; pass dtype=")
        return table_peak(torch.cuda.get_device_name(), dtype or "bf16").flops_per_s


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def _float(value: Any) -> float | None:  # noqa: ANN401  a number, or what holds one
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _marked_mfu(mfu: float) -> str:
    return f"{mfu:.4f}{' (impossible: above 1)' if mfu > BOUND_TOLERANCE else ''}"

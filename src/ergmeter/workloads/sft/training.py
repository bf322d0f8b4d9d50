"""Runs one fine-tuning and measures it, up to its row in the ledger.

The order is: train, save the adapters, close the run, then the row. So a failure loses nothing of
what came before. A training that is stopped or fails is saved and recorded as such.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ergmeter import signals
from ergmeter.errors import UsageError
from ergmeter.integrations.huggingface import ErgmeterCallback
from ergmeter.meter import Meter
from ergmeter.runlog.reader import Run
from ergmeter.workloads.sft import facts, ledger, memory_need, tiny_model, trainers
from ergmeter.workloads.sft.config_file import SftConfig
from ergmeter.workloads.sft.prepared_data import Prepared, prepare_data
from ergmeter.workloads.sft.progress import TrainingWatch, note

# The energy sensor is checked before the training starts, with the messages that SFT-Play's guide
# lists, where there is an NVIDIA GPU. Without a sensor the training runs and its energy cells stay
# empty.


_PCI = Path("/sys/bus/pci/devices")  # each device there has its maker's number in `vendor`
_NVIDIA = "0x10de\n"
_HEAD = "[train] Warning: Could not import metrics: "
_UNMEASURED = "training goes on, the GPU's energy is not measured"


def warning() -> str | None:
    """Why an NVIDIA GPU's sensors can't be read; None if they can, or without such a GPU."""
    is_used = torch.cuda.is_available() and torch.version.hip is None
    if not is_used and not any(file.read_text() == _NVIDIA for file in _PCI.glob("*/vendor")):
        return None
    try:
        import pynvml  # noqa: PLC0415  its absence is one of the answers
    except ImportError:
        return f"{_HEAD}No module named 'pynvml' ({_UNMEASURED}: pip install nvidia-ml-py)"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            todo = "give this user read and write access to /dev/nvidia*"
            return f"{_HEAD}Insufficient permissions ({_UNMEASURED}: {todo})"
        todo = "check the NVIDIA driver with nvidia-smi"
        return f"{_HEAD}NVML initialization failed ({error}; {_UNMEASURED}: {todo})"
    pynvml.nvmlShutdown()
    return None


_MODELS = Path("outputs/models")  # the cache of built-in models


@dataclass(frozen=True)
class TrainingOutcome:
    """The result of a training."""

    status: str  # finished, stopped (by a signal, or since it can't finish), failed, diverged
    output_dir: Path
    saved: bool
    run: Path | None = None
    row: dict[str, object] | None = None
    written: ledger.LedgerRow | None = None
    problem: str = ""
    signal: int | None = None
    is_first: bool = True  # the rank that prints the outcome


def run(
    config: SftConfig,
    *,
    out: Path | None = None,
    watch: TrainingWatch | None = None,
    say: Callable[[str], None] = lambda _line: None,
    finish: Callable[[TrainingOutcome], int] = lambda _outcome: 1,
) -> TrainingOutcome:
    """Runs the training of a configuration. Raises UsageError before it starts.

    `finish` shows the outcome of a training that is ended within a step, and returns the exit code.
    """
    watch = watch or TrainingWatch()
    with signals.handled(watch.on_signal):
        trainers.check(config)
        if config.metrics.enable_energy_logging:
            ledger.check(config.metrics.results_csv)
        where = config.train.output_dir
        if _rank() == 0 and not config.train.resume and any(where.glob("*.safetensors")):
            say(f"[train] {where} holds what an earlier training saved; it will be replaced")
        path, free = source(config), memory_need.free_bytes()
        memory_need.check(config, watch, str(path), free)
        if not watch.reason:
            # Unsloth loads both at once. Others load the model after the check.
            is_unsloth = config.tuning.backend == "unsloth"
            loaded = trainers.load_model(config, path) if is_unsloth else None
            part = partial(trainers.load_part, config, path)
            tokenizer = loaded.tokenizer if loaded else part("AutoTokenizer")
            start = getattr(part("AutoConfig"), "decoder_start_token_id", None)
            data = prepare_data(config, tokenizer, decoder_start=start)
            for line in data.notes if _rank() == 0 else ():
                say(f"[train] {line}")
            memory_need.check(config, watch, str(path), free, data)
        if not watch.reason:
            loaded = loaded or trainers.load_model(config, path)
            meter = _meter(config, out, say)
            return _Fit(config, loaded, data, meter, watch, say, finish).run()
        return TrainingOutcome("stopped", where, False, problem=watch.reason, is_first=_rank() == 0)


def source(config: SftConfig) -> Path | str:
    """The model's source: a built-in one, a directory, or a hub name."""
    if config.model.name.startswith("builtin:"):
        # An absolute path: adapters store it, and are loaded from other directories.
        folder = (config.model.local_dir or _MODELS).resolve()
        return tiny_model.saved_model(config.model.name, folder)
    where = config.model.local_dir or config.model.name
    if str(where).startswith((".", "/", "~")) and not Path(where).is_dir():
        raise UsageError(f"model.name: there is no folder {where}")
    return where


def _meter(config: SftConfig, out: Path | None, say: Callable[[str], None]) -> Meter | None:
    metrics = config.metrics
    if not metrics.enable_energy_logging:
        return None
    if _rank() == 0:
        warned = warning()
        if warned:
            say(warned)
        settings = f"{metrics.sample_interval_s:g}s interval, {metrics.warmup_s:g}s warmup"
        say(f"[train] Energy logging enabled: {settings}")
    return Meter(
        out,
        name=f"train-{config.tuning.backend}",
        sinks=config.train.report_to,
        sinks_every_s=config.train.sinks_every_s,
        **metrics.declared,
        probe_options={
            "nvml": {
                "period_s": metrics.sample_interval_s,
                "gauges_every_s": metrics.log_vram_every_s,
            }
        },
    )


class _Fit:
    """The training, and its end: save, close the run, write the row."""

    def __init__(
        self,
        config: SftConfig,
        loaded: trainers.LoadedModel,
        data: Prepared,
        meter: Meter | None,
        watch: TrainingWatch,
        say: Callable[[str], None],
        finish: Callable[[TrainingOutcome], int],
    ) -> None:
        self._config, self._data, self._meter, self._watch = config, data, meter, watch
        self._say, self._finish = say, finish
        self._facts: dict[str, Any] = {}
        self._outcome: TrainingOutcome | None = None
        self._ending = threading.Lock()  # the main thread and the watch's thread may both end it
        self._first_step = 0
        self._started = datetime.now(timezone.utc).isoformat(timespec="seconds")
        watch.begun = self._begun
        callbacks = [] if meter is None else [ErgmeterCallback(meter=meter)]
        self._trainer = trainers.trainer(config, loaded, data, callbacks=[*callbacks, watch])

    def run(self) -> TrainingOutcome:
        """Train, save, close the run, write the row. A first signal waits until this is done."""
        checkpoint = self._checkpoint()
        with self._watch.watches(self._end_now):
            if self._meter is not None:
                self._meter.start()
            problem = ""
            try:
                done = self._trainer.train(resume_from_checkpoint=checkpoint)
                self._keep_memory(done.metrics)
            except Exception as error:  # noqa: BLE001  saved and written down first, then told
                problem = self._failed(error)
            self._watch.ends()
            outcome = self._ended(problem)
        return replace(outcome, signal=self._watch.by)  # which may have come meanwhile

    def _end_now(self, may_save: bool) -> int:
        """Ends the training within a step, from another thread; returns the exit code."""
        try:
            return self._finish(self._ended("", is_cut=True, may_save=may_save))
        except Exception as error:  # noqa: BLE001  no other thread prints it
            note(f"the training could not be ended properly: {type(error).__name__}: {error}")
            return 1

    def _ended(
        self, problem: str, *, is_cut: bool = False, may_save: bool = True
    ) -> TrainingOutcome:
        """Saves, closes the run and writes the row.

        `may_save` is false while the optimizer changes the weights, or another thread saves them.
        """
        saved, not_saved = self._saved() if may_save else (False, "the weights were in use")
        with self._ending:
            self._outcome = self._outcome or self._recorded(problem, saved, not_saved, is_cut)
            return self._outcome

    def _recorded(self, problem: str, saved: bool, not_saved: str, is_cut: bool) -> TrainingOutcome:
        """Closes the run and writes the row."""
        is_stopped = self._watch.by is not None or self._watch.reason
        status = "failed" if problem else "stopped" if is_stopped else "finished"
        problem = problem or self._watch.reason
        last_losses = self._last_losses({"loss": "train_loss", "eval_loss": "eval_loss"})
        if status == "finished" and not all(map(math.isfinite, last_losses.values())):
            status, problem = "diverged", "the last loss is not a number: it diverged"
        if _rank() == 0:  # the mean over the training differs between ranks
            last_losses |= self._last_losses({"train_loss": "mean_train_loss"})
        ended = {
            **self._facts,
            **{name: loss for name, loss in last_losses.items() if math.isfinite(loss)},
            "steps": self._trainer.state.global_step,
            "status": status,
            "started": self._started,
        }
        run = self._closed(ended, problem)
        # If one failed, the others would wait for a rank that is not coming.
        if status != "failed" and not is_cut and self._trainer.args.world_size > 1:
            self._trainer.accelerator.wait_for_everyone()  # to close their parts of the run
        outcome = TrainingOutcome(
            status, self._config.train.output_dir, saved, run=run, signal=self._watch.by,
            problem="; ".join(text for text in (problem, not_saved) if text),
            is_first=_rank() == 0,
        )  # fmt: skip
        if run is None or _rank() != 0:
            return outcome
        cells = ledger.row(Run.open(run), {**ended, "notes": outcome.problem.replace(";", ",")})
        written = ledger.append_row(self._config.metrics.results_csv, cells)
        return replace(outcome, row=cells, written=written)

    def _begun(self) -> None:
        """Records the facts once the optimizer exists and the model is placed."""
        self._first_step = self._trainer.state.global_step
        self._facts = facts.training_facts(self._config, self._trainer, seq_len=self._data.seq_len)
        self._facts["data_sha256"] = facts.data_sha256(self._data.train)
        if self._meter is not None:
            self._meter.workload({**self._facts, "started": self._started})

    def _checkpoint(self) -> str | None:
        """The path of the last complete checkpoint to resume from; None unless `train.resume`."""
        if not self._config.train.resume:
            return None
        where, ranks = self._config.train.output_dir, self._trainer.args.world_size
        states = where.glob("checkpoint-*[0-9]/trainer_state.json")  # written last
        step = max((int(path.parent.name.rpartition("-")[2]) for path in states), default=0)
        steps = trainers.planned_steps(self._config, len(self._data.train), ranks=ranks)
        problem = "" if step else "no complete checkpoint; train.save_strategy makes them"
        if step >= steps:
            problem = f"step {step} of {steps} is done; give a larger train.max_steps or epochs"
        if problem:
            raise UsageError(f"train.resume: {where}: {problem}")
        return str(where / f"checkpoint-{step}")

    def _keep_memory(self, metrics: dict[str, float]) -> None:
        """Writes the Trainer's memory metrics to all_results.json, where the bench reads them."""
        if not self._config.metrics.hf_memory:
            return
        try:
            self._trainer.save_metrics("train", metrics)  # on the first rank alone
        except OSError as error:
            self._say(f"[train] the Trainer's memory metrics could not be written: {error}")

    def _failed(self, error: Exception) -> str:
        reason = " ".join(str(error).split())[:300]
        step = self._trainer.state.global_step
        where = self._config.train.output_dir / "traceback.txt"
        message = f"at step {step}: {type(error).__name__}: {reason}"
        try:
            where.parent.mkdir(parents=True, exist_ok=True)
            where.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        except OSError:
            return message
        return f"{message} (traceback in {where})"

    def _saved(self) -> tuple[bool, str]:
        """Save the adapters, or the model if all of it was trained; if not saved, return why.

        Without a step nothing is saved, which would replace an earlier training's weights.
        """
        where = self._config.train.output_dir
        if self._trainer.state.global_step <= self._first_step:
            return False, "no step was done, so there is nothing to save"
        try:
            self._trainer.save_model(str(where))
            self._trainer.save_state()
        except Exception as error:  # noqa: BLE001  the run and the row are still to be written
            return False, f"not saved in {where}: {type(error).__name__}: {error}"
        return True, ""

    def _closed(self, ended: dict[str, Any], problem: str) -> Path | None:
        """Close the run with the facts of the training at its end, and return its path."""
        if self._meter is None:
            return None
        self._meter.workload(ended)
        ending = f"failed ({problem[:300]})" if problem else None
        if ended["status"] == "stopped":
            by, reason = self._watch.by, self._watch.reason.partition(":")[0]
            ending = f"stopped ({signal.Signals(by).name if by else reason})"
        self._meter.close(ending)
        if _rank() == 0:
            self._say("[train] Energy logging stopped")
        return self._meter.path

    def _last_losses(self, names: dict[str, str]) -> dict[str, float]:
        """The last value that the Trainer logged for each of these names, under our name.

        The Trainer's `loss` is the mean since the log before, `train_loss` that of the training.
        """
        history = self._trainer.state.log_history
        return {
            ours: float(entry[name])
            for entry in history
            for name, ours in names.items()
            if name in entry
        }


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))

"""Metrics of comparisons, bench cells, jobs and Trainium analyses, which single runs lack.

Other modules fill in the values. For a run, each is absent with the reason.
"""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, Scope
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.records import Direction


def _raise(why: str, _: Evidence) -> NoReturn:
    raise NotMeasurable(why)


def _of_scope(scope: Scope, needs: str, why: str) -> partial[Metric]:
    """Return a constructor for metrics of a scope; `why`: the reason why a run lacks them."""
    return partial(Metric, needs=(needs,), compute=partial(_raise, why), scope=scope)


_compared = _of_scope("comparison", "a comparison", "only comparisons have this: erg compare")
_of_cell = _of_scope("cell", "a cell of a bench", "only bench cells have this: erg bench run")
_cell_bytes = partial(_of_cell, unit="B", direction="lower")
_of_job = _of_scope("job", "the runs of a job", "only jobs have this: erg job")
_analysed = _of_scope(
    "analysis", "compiled graphs (HLO)", "only Trainium analyses have this: erg analyze"
)
# Of rank 0, by transformers' Trainer with its memory metrics. FMS's program takes the most of init
# and train, its guide adds all changes and peaks, its first file format has the seed's.
_TRAINER_MEMORY = {
    "before": "allocated before the Trainer was made",
    **{
        f"{stage}_{name}": f"{title} of the Trainer's stage {stage}"
        for stage in ("init", "train", "evaluate", "predict")
        for name, title in (("alloc", "allocated at the end"), ("peak", "highest allocation"))
    },
    "alloc": "the most allocated at the end of init or train",
    "peak": "the most allocated in init or train",
    "peak_prose": "all changes and all peaks of the stages, added",
    "discrepancy": "memory.hf_peak_prose_bytes - memory.hf_peak_bytes",
    "seed": "allocated, by FMS's first file format",
}
_JOB: tuple[tuple[str, str, str, Direction, str], ...] = (
    ("wall_s", "time, first start to last end", "s", "lower", "last run's end - first run's start"),
    ("down_s", "between the runs", "s", "lower", "job.wall_s - time covered by a run"),
    ("goodput_frac", "goodput", "frac", "higher", "time in steps that were kept / job.wall_s"),
    ("steps", "steps kept", "steps", "neither", "steps that no later run repeated"),
    ("lost_steps", "steps made again", "steps", "lower", "steps that a later run repeated"),
    ("tokens", "tokens kept", "tokens", "neither", "tokens of all ranks in the steps kept"),
    ("tokens_per_s", "tokens/s kept", "tokens/s", "higher", "job.tokens / job.wall_s"),
    ("energy_j", "energy, all runs", "J", "lower", "sum of the runs' energy, lost steps included"),
)
_TRAINER_PEAK_VIEWS = (
    "bench report 60 in memory as hf expected;"
    " bench matrix 90 in memory as memory in tensors, peak (hf)"
)

METRICS = [
    _compared(
        "training.eval_loss",
        "evaluation loss",
        "1",
        "lower",
        "the last evaluation loss that the program printed or stored in the run's header",
        scale="difference",
        column="eval_loss",
        rule="eval_loss",
        views="serve ledger 60 as eval loss; ledger 40 in trainer as eval_loss;"
        " compare 100 as eval loss",
    ),
    _compared(
        "target.time_s",
        "time to the target loss",
        "s",
        "lower",
        "first training step to the step whose smoothed loss is at or below the target",
        views="compare target 10 as to target",
    ),
    _compared(
        "target.energy_j",
        "energy to the target loss",
        "J",
        "lower",
        "as energy.run_j, over target.time_s",
        views="compare target 20 as energy",
    ),
    *(
        _of_cell(
            f"throughput.{kind}_tokens_per_s_per_device",
            f"tokens/s {kind} per device",
            "tokens/s",
            "higher",
            f"throughput.{kind}_tokens_per_s / devices of the cell",
            quantity="speed",
            column=f"{kind}_tokens_per_s_per_device",
        )
        for kind in ("real", "computed")
    ),
    _of_cell("training.epoch", "epochs", "1", "neither", "as printed at the end", column="epoch"),
    _cell_bytes(
        "memory.peak_bytes",
        "peak memory",
        formula="the first of its alternatives that both sides of a comparison have",
        alternatives=(
            *("memory.hf_peak_bytes", "memory.allocator_peak_bytes", "memory.nvidia_peak_bytes"),
            *("memory.nvidia_mean_bytes", "memory.hf_seed_bytes", "memory.device_peak_bytes"),
            "memory.process_peak_bytes",
        ),
        rule="peak_memory",
        views="bench compare 40",
    ),
    _cell_bytes(
        "memory.nvidia_mean_bytes",
        "nvidia-smi memory, mean of devices",
        formula="peak above the first reading, mean over devices",
        column="memory_nvidia_mean_bytes",
        rule="nvidia_memory",
        rule_aliases=("mem_nvidia_mem_reserved",),
        views="bench report 90 in memory as nvidia mean expected;"
        " bench matrix 120 in memory as device memory, peak, mean of the devices",
    ),
    _cell_bytes(
        "memory.nvidia_peak_bytes",
        "nvidia-smi memory, peak",
        formula="peak above the first reading, of the device with most",
        column="memory_nvidia_peak_bytes",
        views="bench report 80 in memory as nvidia expected;"
        " bench matrix 110 in memory as device memory, peak",
    ),
    *(
        _cell_bytes(
            f"memory.hf_{name}_bytes",
            f"transformers' memory, {name.replace('_', ' ')}",
            direction="neither" if name == "discrepancy" else "lower",
            formula=f"{formula}, rank 0",
            column=f"memory_hf_{name}_bytes",
            rule="hf_memory" if name == "peak" else "",
            rule_aliases=("mem_peak_torch_mem_alloc_in_bytes",) if name == "peak" else (),
            views=_TRAINER_PEAK_VIEWS if name == "peak" else "",
        )
        for name, formula in _TRAINER_MEMORY.items()
    ),
    *(
        _of_job(f"job.{name}", title, unit, direction, formula)
        for name, title, unit, direction, formula in _JOB
    ),
    # In the view "analyze json", a label is nki-llama's name and a group the unit there.
    _analysed(
        "analysis.tflop_per_sequence",
        "work of a sequence",
        "TFLOP",
        "neither",
        "forward and backward FLOPs of one sequence, under the convention of the note",
        needs=("a model's configuration",),
        views="analyze 50; analyze json 10 in TFLOP as tflop_per_sequence",
    ),
    _analysed(
        "analysis.tflop_per_s",
        "work",
        "TFLOP/s",
        "higher",
        "TFLOP of a sequence x sequences/s",
        needs=("a model's configuration", "a throughput"),
        views="analyze 40; analyze json 30 in TFLOP/s as tflops_per_second",
    ),
    _analysed(
        "analysis.nki_frac",
        "NKI share",
        "frac",
        "higher",
        "multiply-adds that NKI kernels state / all multiply-adds of the graphs",
        upper_bound=1.0,
        same_facts=("counted_by",),
        views="card 570 in compute; analyze 60; analyze json 60 as overall_nki_ratio;"
        " analyze compare 30",
    ),
    _analysed(
        "analysis.score",
        "score",
        "1",
        "higher",
        "MFU / base x throughput / base x loss x convergence x (offset + NKI share)",
        needs=("a model's configuration", "a throughput", "compiled graphs (HLO)", "a baseline"),
        same_facts=("score_offset", "base_mfu", "base_throughput", "score_convention"),
        views="card 580 in compute; analyze 70; analyze json 70 as training_score;"
        " analyze compare 40",
    ),
]

"""The original's numbers: `calculate_training_metrics.py` of nki-llama, 2025-06-12 (3c877c4).

For whoever has to compare with figures it printed. The formulas are the original's, with their
faults; the list of what was kept goes into the output. Whatever is shown as the original's figure
comes from here: a count of ours with the same formula differs for all but dense Llamas.

The FLOPs are those of neuronx-distributed-training's llama_perf_estimate.py, which it calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError, UsageError
from ergmeter.flops.source import read_model
from ergmeter.neuron.score import score_statistics
from ergmeter.records import BOUND_TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = "nki-llama calculate_training_metrics.py, 2025-06-12 (commit 3c877c4)"

QUIRKS = (
    "tflops_per_second is TFLOP of one sequence, not per second",
    "FLOPs count the embedding lookup as a matrix product, the softmax as 6 operations a pair and"
    " every pair of tokens, causal or not",
    "query and output projections are hidden x hidden, whatever head_dim says; LoRA is counted as"
    " full training",
    "the peak is that of whole instances, 3040 TFLOP/s (trn1) or 10672 (trn2) a node, whatever"
    " trainer.devices says; nodes are those of --num-nodes, else 1",
    "without a throughput 100 sequences/s are taken",
    "the log's throughput is the mean of all printed values that differ from the one before,"
    " warm-up included; exponents are cut off (2.73e-5 reads as 2.73)",
    "MACs are summed over every computation of every graph once: no loop counts, no convolutions,"
    " both branches of a condition, unreadable and absent kernel MACs as 0",
    "average, minimum and maximum NKI ratio leave out the graphs at 0",
    "what config.json leaves out is taken from transformers' LlamaConfig: hidden_size 4096, 32"
    " heads and layers, intermediate_size 11008, vocab_size 32000",
)
NOT_KEPT = (
    "--per-file-scores gives scores without --calculate-score as well, as the guide has it; there"
    " the original gives none",
    "a log that is not there is an error instead of a warning",
    "unreadable kernel configurations are counted instead of announced one by one",
)

PEAK_TFLOP_PER_S_PER_NODE = {"trn1": 3040.0, "trn2": 10672.0}
DEFAULT_SEQ_PER_S = 100.0

# What transformers' LlamaConfig takes where config.json does not say.
_LLAMA = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}
# Its own also name model.hlo_module.pb and graph.hlo, which these match first.
PATTERNS = ("*.hlo_module.pb", "*.hlo")


@dataclass(frozen=True, slots=True)
class OriginalFigures:
    """What it prints about arithmetic, under its own names."""

    mfu_percent: float
    tflop_per_sequence: float
    tflop_per_s_per_node: float
    seq_per_s_per_node: float
    batch_s: float


def original_figures(
    model: str, *, batch_size: int, seq_len: int, seq_per_s: float, nodes: int, backend: str
) -> OriginalFigures:
    """MFU and what goes with it."""
    peak = PEAK_TFLOP_PER_S_PER_NODE.get(backend)
    if peak is None:
        raise UsageError(
            f"--compat knows --hw-backend trn1 and trn2, as the original does; got {backend}"
        )
    tflop = sequence_flops(model, seq_len) / 1e12
    per_node = seq_per_s * tflop / nodes
    return OriginalFigures(
        per_node * 100 / peak, tflop, per_node, seq_per_s / nodes, batch_size / seq_per_s
    )


def impossible_mfu(mfu_percent: float, *, why: str = "") -> dict[str, str]:
    """By key, why the MFU and the score made from it cannot be right; nothing where they can."""
    if not why and mfu_percent <= 100 * BOUND_TOLERANCE:
        return {}
    why = why or "above 100 %: an input is wrong"
    return {"mfu_percent": why, "training_score": f"computed from an MFU {why}"}


def sequence_flops(model: str, seq_len: int) -> int:
    """Forward and backward FLOPs of one sequence, by the original's formula."""
    config = read_model(model)
    fields = config.fields
    sizes: dict[str, Any] = {n: fields.get(n, default) for n, default in _LLAMA.items()}
    heads_of_keys = fields.get("num_key_value_heads")
    sizes["kv"] = sizes["num_attention_heads"] if heads_of_keys is None else heads_of_keys
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise FormatError(f"{config.where}: {name} must be a whole number; got {value!r}")
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head_size, squared = hidden // heads, seq_len * seq_len
    projections = 2 * hidden**2 * seq_len * 2 + 2 * (2 * sizes["kv"] * head_size * hidden * seq_len)
    core = 2 * squared * hidden * 2 + 6 * heads * squared
    feed_forward = 3 * (2 * hidden * sizes["intermediate_size"] * seq_len)
    tables = 2 * (2 * sizes["vocab_size"] * hidden * seq_len)
    forward: int = sizes["num_hidden_layers"] * (projections + core + feed_forward) + tables
    return 3 * forward


def original_files(directory: str) -> list[str]:
    """The files it would open, in its order: pattern by pattern, each path once."""
    base = Path(directory)
    found = (str(path) for pattern in PATTERNS for path in base.rglob(pattern))
    return list(dict.fromkeys(found))


def original_summary(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Its summary: ratios over the files above 0 alone, 0 where there is none."""
    good = [file for file in files if file["status"] == "success"]
    macs, nki = (sum(file[name] for file in good) for name in ("hlo_macs", "nki_macs"))
    ratios = [file["nki_ratio"] for file in good if file["nki_ratio"] > 0]
    summary: dict[str, Any] = {
        "total_files": len(files),
        "successful_analyses": len(good),
        "failed_analyses": len(files) - len(good),
        "total_hlo_macs": macs,
        "total_nki_macs": nki,
        "overall_nki_ratio": nki / macs if macs > 0 else 0.0,
        "average_nki_ratio": sum(ratios) / len(ratios) if ratios else 0.0,
        "min_nki_ratio": min(ratios, default=0.0),
        "max_nki_ratio": max(ratios, default=0.0),
    }
    return summary | score_statistics(file.get("training_score") for file in good)

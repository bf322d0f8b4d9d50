"""What is in a row of results, whatever was run and however it ended?

The trap: a table whose columns depend on what happened to vary. FMS drops each column that is
constant in this run, so two files of one benchmark do not line up, and a comparison across them
goes by row position. Here every table has these columns, in this order; what a scenario has beyond
them is in `settings`, and what a program printed beyond them is in `raw`.
"""

from __future__ import annotations

import pyarrow as pa

VERSION = 1

IDENTITY = {
    "index": pa.int64(),
    "id": pa.string(),
    "group": pa.string(),
    "scenario": pa.string(),
    "repeat": pa.int64(),
    "num_gpus": pa.int64(),
    "nodes": pa.int64(),
}
OUTCOME = {
    "status": pa.string(),
    "reason": pa.string(),
    "exit_code": pa.int64(),
    "attempts": pa.int64(),
    "started": pa.string(),
    "ended": pa.string(),
    "claims_held": pa.int64(),
    "claims_broken": pa.string(),  # names, joined by "; "
}
# Arguments by the names that FMS and transformers give them, as text.
ARGUMENTS = {
    name: pa.string()
    for name in (
        *("framework_config", "model_name_or_path", "peft_method", "torch_dtype", "bf16", "fp16"),
        *("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"),
        *("packing", "max_seq_length", "max_steps", "learning_rate", "r", "lora_alpha"),
        *("lora_dropout", "target_modules"),
    )
}
RATES = {
    "tokens_per_s": pa.float64(),  # global; real where known, else computed: `tokens_counted`
    "tokens_per_s_per_device": pa.float64(),
    "tokens_counted": pa.string(),  # real, computed, or as the program counted
    "real_tokens_per_s": pa.float64(),
    "real_tokens_per_s_per_device": pa.float64(),
    "computed_tokens_per_s": pa.float64(),
    "computed_tokens_per_s_per_device": pa.float64(),
    "padding_frac": pa.float64(),
    "samples_per_s": pa.float64(),
    "steps_per_s": pa.float64(),
    "step_median_s": pa.float64(),
    "runtime_s": pa.float64(),
    "rates_from": pa.string(),  # run: measured; trainer: what transformers printed
}
FIGURES = {
    "loss": pa.float64(),
    "eval_loss": pa.float64(),
    "epoch": pa.float64(),
    "window": pa.string(),  # the kind that measured rates, MFU and energy are over; empty: unbroken
    "timed_steps": pa.float64(),  # that the rates are of, after the warm-up
    "timed_s": pa.float64(),  # and how long they took together
    "mfu_frac": pa.float64(),
    "whole_run_tokens_per_s": pa.float64(),  # from the start of the command or the Meter to the end
    "whole_run_mfu_frac": pa.float64(),
    "whole_run_joules_per_token": pa.float64(),
    "joules_per_token": pa.float64(),
    "energy_j": pa.float64(),
    "mean_w": pa.float64(),
}
MEMORY = {
    "memory_nvidia_mean_bytes": pa.float64(),  # peak above the first reading, mean of the devices
    "memory_nvidia_peak_bytes": pa.float64(),  # the same, of the device with most
    "memory_nvidia_devices_bytes": pa.list_(pa.float64()),  # the same, of each
    "memory_nvidia_first_bytes": pa.list_(pa.float64()),  # what each held before: subtracted
    "memory_nvidia_ids": pa.string(),  # of these devices, joined by spaces
    "memory_nvidia_from": pa.string(),  # nvml: this run's probe; nvidia-smi: its log; reference
    "memory_nvidia_note": pa.string(),  # why it is not what was asked for
    # The Trainer's, of rank 0: before it was made, then when each stage ended, and at most in it.
    "memory_hf_before_bytes": pa.float64(),
    **{
        f"memory_hf_{stage}_{what}_bytes": pa.float64()
        for stage in ("init", "train", "evaluate", "predict")
        for what in ("alloc", "peak")
    },
    "memory_hf_alloc_bytes": pa.float64(),  # FMS's program: the most at the end of init or train
    "memory_hf_peak_bytes": pa.float64(),  # FMS's program: the most in init or train
    "memory_hf_peak_prose_bytes": pa.float64(),  # FMS's guide: all changes and all peaks, added
    "memory_hf_discrepancy_bytes": pa.float64(),  # the guide's sum less the program's
    "memory_hf_seed_bytes": pa.float64(),
    "memory_device_peak_bytes": pa.float64(),  # as the device said it, nothing subtracted
    "memory_allocator_peak_bytes": pa.float64(),  # of the rank and device with most
    "memory_allocator_devices_bytes": pa.list_(pa.float64()),  # of each
    "memory_allocator_ids": pa.string(),  # rank0/cuda:0 and so on, joined by spaces
    "memory_process_peak_bytes": pa.float64(),
}
REST = {
    "device": pa.string(),
    "missing": pa.string(),  # JSON: column to the reason why it is empty
    "impossible": pa.string(),  # JSON: column to the reason why its value cannot be right
    "settings": pa.string(),  # JSON: every argument and axis
    "raw": pa.string(),  # JSON: what results.json was told, or the reference's row, as it was
    "training": pa.string(),  # JSON: the whole training, warm-up included, by the Trainer's names
    "path": pa.string(),
}

COLUMNS: dict[str, pa.DataType] = {
    **IDENTITY,
    **OUTCOME,
    **ARGUMENTS,
    **RATES,
    **FIGURES,
    **MEMORY,
    **REST,
}
SCHEMA = pa.schema(list(COLUMNS.items()), metadata={"ergmeter.bench.version": str(VERSION)})
NUMBERS = tuple(name for name in (*RATES, *FIGURES, *MEMORY) if COLUMNS[name] == pa.float64())

FAILED = ("oom", "error", "timeout", "diverged", "cancelled")
DONE = ("ok", *FAILED, "skipped")

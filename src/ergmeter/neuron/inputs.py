"""What an analysis was made from: each file and each size, and who said so.

The trap: a page that outlives the command that made it. "Batch 64" may be the YAML's, the log's, an
option's or an assumption, and a year later nobody knows. So each input keeps its source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.neuron.request import DEFAULT_COMPILE_DIR

if TYPE_CHECKING:
    from ergmeter.neuron.parts import Parts
    from ergmeter.neuron.request import Request

Input = dict[str, Any]


def inputs(parts: Parts) -> list[Input]:
    """Files, then sizes, in the order in which they are read."""
    job, machine, pace, peak = parts.job, parts.machine, parts.pace, parts.machine.core_flops_per_s
    devices_from = job.devices_from if job.devices is not None else "assumed, see the notes"
    form = None if parts.log is None else f"--log-file, read as {parts.log.format}"
    return [
        *files_read(parts.request, log_from=form),
        _input("sequences a step", job.batch_size, job.batch_from),
        _input("tokens a sequence", job.seq_len, job.seq_len_from),
        _input("sequences per second", pace.seq_per_s, pace.said),
        _input("nodes", job.nodes, job.nodes_from),
        _input("devices of a node", machine.devices_per_node, devices_from),
        _input("cores in all", machine.cores, "devices, and what a device is"),
        _input("type of products", job.dtype, job.dtype_from),
        _input("TFLOP/s of a core", peak / 1e12, machine.source),
        _input("recomputation", job.checkpointing, "the YAML"),
    ]


def files_read(request: Request, *, log_from: str | None = None) -> list[Input]:
    """The files that were named, or looked for."""
    directory = request.compile_dir
    cache_from = "--compile-dir" if directory else "the default of --compile-dir"
    found = [
        _input("training's YAML", request.config, "--config"),
        _input("model", request.model_config, "--model-config"),
        _input("log", request.log_file, log_from or "--log-file"),
        _input("compile cache", directory or DEFAULT_COMPILE_DIR, cache_from),
    ]
    if request.graph_runs is not None:
        found.append(_input("runs of each graph", request.graph_runs, "--graph-runs"))
    return found


def compat_inputs(
    request: Request, *, batch_size: int, seq_len: int, seq_per_s: float, rate_from: str
) -> list[Input]:
    """The same, of what the original knows."""
    return [
        *files_read(request),
        _input(
            "sequences a step", batch_size, "--batch-size" if request.batch_size else "the YAML"
        ),
        _input("tokens a sequence", seq_len, "--seq-len" if request.seq_len else "the YAML"),
        _input("sequences per second", seq_per_s, rate_from),
        _input("nodes", request.num_nodes or 1, "--num-nodes" if request.num_nodes else "assumed"),
    ]


def _input(what: str, value: str | float | None, source: str) -> Input:
    return {"what": what, "value": value, "from": "not given" if value is None else source}

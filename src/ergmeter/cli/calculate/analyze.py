"""`erg analyze`, also `calculate_training_metrics.py`: the metrics of a Trainium training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import (
    SHORT_FLAGS,
    Forms,
    check_folder,
    check_page,
    check_writable,
    flag,
    given_parameters,
    path_option,
    progress_bar,
    repeated,
    with_default,
    with_each,
    with_format,
    with_page,
    without_effect,
)
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.neuron.analysis import Analysis, AnalysisRequest

_INPUTS = [
    click.option("--config", metavar="YAML", help="The training's YAML. Needed."),
    click.option("--model-config", metavar="JSON", help="The model's config.json. Needed."),
    click.option(
        "--compile-dir",
        metavar="DIR",
        help="Neuron compile cache, or a part of it.  [default: /home/ubuntu/neuron_cache]",
    ),
    click.option("--log-file", metavar="LOG", help="The training's log, for its throughput."),
    click.option("--batch-size", type=int, help="Global batch size, instead of the YAML's."),
    click.option("--seq-len", type=int, help="Tokens of a sequence, instead of the YAML's."),
    click.option("--throughput", type=float, help="Sequences per second, instead of the log's."),
    click.option("--num-nodes", type=int, help="Nodes, instead of trainer.num_nodes."),
    click.option("--devices", type=int, help="Devices of a node, instead of trainer.devices."),
    click.option(
        "--lnc",
        type=click.Choice(["1", "2"]),
        help="Physical cores in a device.  [default: 2 on trn2 and trn3, else 1]",
    ),
    click.option("--dtype", help="Type of matrix products, instead of precision.type."),
    with_default(
        "--hw-backend",
        type=click.Choice(["trn1", "trn2", "trn3", "inf2"]),
        default="trn1",
        help="The family of instances.",
    ),
    click.option(
        "--convention",
        help="How FLOPs are counted; `neuron`: as in nki-llama. `erg conventions` explains all."
        "  [default: exact]",
    ),
]
_CHOICE = [
    repeated("--compiler-version", help="Only graphs of this version. May be repeated."),
    repeated("--module", help="Only this MODULE_... May be repeated."),
    click.option("--since", help="Only graphs written since that time."),
    click.option("--until", help="Only graphs written until that time."),
    flag("--modules-from-log", help="Only modules that the log names."),
    click.option(
        "--graph-runs", metavar="FILE", help="How often each graph ran: lines `MODULE_... 1234`."
    ),
    without_effect("--processes"),
]
_SCORE = [
    flag("--calculate-score", help="The training score, with its factors."),
    flag("--per-file-scores", help="A score for each graph."),
    *(
        with_default(name, type=float, default=value, help=meaning)
        for name, value, meaning in (
            ("--base-mfu", 50.0, "Baseline MFU in percent."),
            ("--base-throughput", 100.0, "Baseline sequences/s."),
            ("--loss-improvement", 1.0, "Baseline loss / achieved loss."),
            ("--convergence-rate", 1.0, "Baseline steps / achieved steps."),
        )
    ),
    with_default(
        "--score-offset",
        type=click.Choice(["1", "0.1"]),
        default="1",
        help="The score's NKI factor is this plus the ratio; 0.1 since 2025-06-26.",
    ),
]
_OUTPUT: list[Any] = [
    click.option(
        "--output",
        metavar="JSON",
        help="File to write.  [default: training_metrics.json; none with --format json or md]",
    ),
    path_option("--run", help="A run directory to make from the log and these metrics."),
    flag("--detailed", help="Graphs one by one in the JSON."),
    flag("--print-per-file", help="Graphs one by one on the console."),
    with_page,
    with_format(
        *("text", "json", "md"),
        help="What is printed; json and md print nothing else.",
        flags=SHORT_FLAGS,
    ),
    flag("--compat", help="The numbers of nki-llama of 2025-06-12, faults included."),
    flag("--compare", help="Compare earlier outputs: --compare A.json B.json"),
]


_SCRIPT = "calculate_training_metrics.py"
_GRAPHS_IN_MARKDOWN, _GRAPHS_ON_A_PAGE = 20, 200


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.argument("earlier", nargs=-1, metavar="[FILES]...")
@with_each(*_INPUTS, *_CHOICE, *_SCORE, *_OUTPUT)
def command(
    earlier: tuple[str, ...],
    compare: bool,
    forms: Forms,
    compat: bool,
    output: str | None,
    run: Path | None,
    print_per_file: bool,
    **options: Any,  # noqa: ANN401  what `_request` takes
) -> None:
    """Calculate MFU, the NKI share of compiled graphs and a score of a Trainium training.

    From its YAML, its model's config.json, its log and its compile cache; no Neuron device or SDK
    is needed. Takes the flags of nki-llama's calculate_training_metrics.py and writes its keys.
    """
    if compare:
        _check_alone()
        _compare(earlier, forms)
        return
    if earlier:
        raise UsageError(f"{earlier[0]!r} is unexpected: files are for --compare")
    request = _request(**options)
    path = output or ("training_metrics.json" if forms.form == "text" else None)
    _check_shown(request, form=forms.form, per_file=print_per_file, is_written=path is not None)
    if path is not None:
        _check_output(Path(path), request)
    check_page(forms.page, [Path(path)] if path is not None else ())
    _check_run(run, request, is_original=compat)
    if compat:
        from ergmeter.compat.nki_llama import analyze_compat as analyze
    else:
        from ergmeter.neuron.analysis import analyze
    from ergmeter.views.calculate.analyze import console_document, document

    with progress_bar("", refresh_per_second=10) as show:
        analysis = analyze(request, lambda what, done, total: show(done, total or None, what))
    run_path = _write_run(analysis, run)
    content = document(analysis, most_graphs=_GRAPHS_IN_MARKDOWN)
    text = json.dumps(content.data, indent=4, allow_nan=False)
    if path is not None:
        Path(path).write_text(text + "\n", encoding="utf-8")
    if forms.form == "json":
        click.echo(text)
    elif forms.form == "md":
        Forms("md").show(content)
    else:
        Forms("text").show(console_document(analysis, per_file=print_per_file))
        click.echo(f"\nMetrics saved to: {path}")
    if run_path is not None:
        click.echo(f"Run saved to: {run_path}", err=forms.form != "text")
    if forms.page is not None:
        forms.write_page(document(analysis, most_graphs=_GRAPHS_ON_A_PAGE))


def main() -> None:
    """Entry point of `calculate_training_metrics.py`."""
    from ergmeter.cli.main import main as run

    run(command=command, program=_SCRIPT)


def _request(**options: Any) -> AnalysisRequest:  # noqa: ANN401  click passes what it parsed
    from ergmeter.neuron.analysis import AnalysisRequest
    from ergmeter.neuron.compile_cache import Choice, parse_time
    from ergmeter.neuron.score import Baseline
    from ergmeter.records import dtype_named

    for name, what in (("config", "training's YAML"), ("model_config", "model's config.json")):
        if options[name] is None:
            raise UsageError(f"the {what} is needed: pass --{name.replace('_', '-')}")
    since, until = options.pop("since"), options.pop("until")
    choice = Choice(
        compilers=options.pop("compiler_version"),
        modules=options.pop("module"),
        since=parse_time(since, option="--since") if since else None,
        until=parse_time(until, option="--until") if until else None,
    )
    baseline = Baseline(
        mfu_percent=options.pop("base_mfu"),
        throughput_seq_per_s=options.pop("base_throughput"),
        loss_improvement=options.pop("loss_improvement"),
        convergence_rate=options.pop("convergence_rate"),
        offset=float(options.pop("score_offset")),
    )
    lnc = options.pop("lnc")
    options |= {"dtype": dtype_named(options["dtype"]), "lnc": int(lnc) if lnc else None}
    return AnalysisRequest(**options, choice=choice, baseline=baseline)


def _check_output(path: Path, request: AnalysisRequest) -> None:
    """Refuse an output path that can't be written, or that is one of the inputs."""
    check_writable(path, option="--output")
    read = (request.config, request.model_config, request.log_file, request.graph_runs)
    for source in filter(None, read):
        if path.exists() and Path(source).exists() and path.samefile(source):
            raise UsageError(f"--output {path} is an input; name another file")


def _check_run(run: Path | None, request: AnalysisRequest, *, is_original: bool) -> None:
    """Refuse --run if no run can be made, or if its directory is taken."""
    if run is None:
        return
    from ergmeter.neuron.run import check_run

    check_run(request, is_original=is_original)
    check_folder(run.absolute().parent, option="--run")
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise UsageError(f"--run {run} exists and is not empty; name another directory")


def _write_run(analysis: Analysis, run: Path | None) -> Path | None:
    if run is None:
        return None
    from ergmeter.neuron.run import write_run

    return write_run(analysis, run)


def _check_shown(request: AnalysisRequest, *, form: str, per_file: bool, is_written: bool) -> None:
    """Refuse options that would have no effect."""
    if per_file and form != "text":
        raise UsageError(f"--print-per-file prints text, --format {form} only {form}: omit one")
    if request.detailed and form == "md" and not is_written:
        raise UsageError("--detailed adds to the JSON: give --output, or leave out --format md")


_OF_COMPARE = ("earlier", "compare", "as_json", "as_markdown", "form", "page")


def _check_alone() -> None:
    """Refuse options that have no effect with --compare."""
    for name, option in given_parameters().items():
        if name not in _OF_COMPARE:
            message = "--compare goes with files, --json, --md, --format and --html"
            raise UsageError(f"{message}; leave out {option.opts[0]}")


def _compare(paths: tuple[str, ...], forms: Forms) -> None:
    from dataclasses import replace

    from ergmeter.compare.run_curves import compared_curves
    from ergmeter.neuron.earlier_output import (
        compare_outputs,
        comparison_keys,
        read_outputs,
        with_column_names,
    )
    from ergmeter.views.compare import comparison_data, comparison_document

    outputs = read_outputs(paths)
    comparison = compare_outputs(outputs)
    curves = None if forms.page is None else compared_curves(comparison.groups)
    document = comparison_document(with_column_names(comparison), curves, lists_runs=True)
    data, keys = comparison_data(comparison), comparison_keys(comparison, outputs)
    groups = [a | b for a, b in zip(data["groups"], keys["groups"], strict=True)]
    forms.show(replace(document, data=data | keys | {"groups": groups}))

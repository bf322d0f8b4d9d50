"""`erg train`: one fine-tuning, or several that take turns, measured, with a row in the ledger."""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.measure.torch_workload import needing
from ergmeter.cli.options import flag, path_option, print_json, progress_bar, repeated, with_default
from ergmeter.cli.run_options import with_sink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ergmeter.workloads.sft.config_file import SftConfig
    from ergmeter.workloads.sft.training import TrainingOutcome

_LINE_S = 30.0
# Exit codes of a training that ends its series: it can't run, or can't finish, here.
_MISUSED, _CANT_FINISH = 2, 3


@click.command()
@path_option(
    "--config", "config_path", required=True, help="The YAML file that says what to train, and how."
)
@repeated(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    help="Change one key of the configuration, such as train.max_steps=50. May be repeated.",
)
@with_sink
@path_option("--out", help="The run directory to make. [default: runs/DATE-train-BACKEND-xxxx]")
@with_default(
    "--repeats",
    type=click.IntRange(1, 1000),
    default=1,
    help="Train this many times, with seeds that follow each other, each in a process of its own.",
)
@path_option(
    "--interleave",
    multiple=True,
    help="Another configuration to take turns with: A B, B A, ... May be repeated.",
)
@with_default(
    "--cool-down",
    "cool_down_s",
    type=click.FloatRange(0),
    default=15.0,
    help="Seconds between two trainings of a series.",
)
@with_default(
    "--grace",
    "grace_s",
    type=click.FloatRange(0),
    default=60.0,
    help="Seconds that SIGINT or SIGTERM leave the step in progress to end; 0 ends it at once.",
)
@flag(
    "--anyway",
    help="Train even if the estimate is above the free memory, or above 6 hours.",
)
@click.option("--in-series", type=(int, float), hidden=True)
@click.option(
    "--report/--no-report",
    default=None,
    help="Show the card at the end. [default: as the configuration's `report:` says]",
)
@flag("--json", "as_json", help="The row as JSON, and no card.")
@flag("--quiet", help="Only the result: no progress.")
def command(
    config_path: Path,
    changes: tuple[str, ...],
    sinks: tuple[str, ...],
    out: Path | None,
    repeats: int,
    interleave: tuple[Path, ...],
    cool_down_s: float,
    grace_s: float,
    anyway: bool,
    in_series: tuple[int, float] | None,
    report: bool | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Fine-tune a model as a YAML file says, measured, and append a row to the energy ledger.

    Backends are torch, bnb (bitsandbytes) and unsloth: the configured one runs, or it stops with
    the reason. Under torchrun or accelerate every rank trains and the first writes the row.

    \b
    erg train --config configs/cpu/run_torch.yaml
    erg train --config configs/run_bnb.yaml --set train.max_steps=200
    erg train --config configs/run_bnb.yaml --interleave configs/run_torch.yaml --repeats 5
    """
    from ergmeter.workloads.sft.config_file import load

    if sinks:
        changes = (*changes, f"train.report_to={json.dumps(sinks)}")
    settings = _changes(changes)
    configs = [load(path, changes=settings) for path in (config_path, *interleave)]
    if repeats > 1 or interleave:
        if as_json or report:
            raise click.UsageError("--json and --report are for one training; see erg compare")
        options = ["--grace", str(grace_s), *(["--anyway"] if anyway else [])]
        options += ["--quiet"] if quiet else []
        for change in changes:
            options += ["--set", change]
        return _series(configs, repeats, options, out=out, cool_down_s=cool_down_s, quiet=quiet)
    config = configs[0]

    def say(line: str) -> None:
        click.echo(line, err=as_json)

    def finish(outcome: TrainingOutcome) -> int:
        stack.close()
        if outcome.is_first:
            _show(outcome, report=config.report if report is None else report, as_json=as_json)
        if outcome.signal is not None:
            return 128 + outcome.signal
        if outcome.status == "stopped" and in_series:
            return _CANT_FINISH
        return 1 if outcome.problem else 0

    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(sys.stderr if as_json else sys.stdout))
        training = _workload(config)  # libraries print, too
        tell = stack.enter_context(_progress(config, quiet=quiet or as_json))
        watch = training.TrainingWatch(tell, anyway, grace_s, in_series or (1, 0.0))
        outcome = training.run(config, out=out, watch=watch, say=say, finish=finish)
    return finish(outcome)


def _changes(pairs: Sequence[str]) -> dict[str, object]:
    import yaml

    from ergmeter.errors import UsageError

    settings: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"--set takes KEY=VALUE, as in train.max_steps=50; got {pair!r}")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UsageError(f"--set {pair}: {value!r} is not a YAML value") from error
    return settings


def _workload(config: SftConfig) -> Any:  # noqa: ANN401  the module
    import importlib

    libraries = ("torch", "transformers", "peft", "accelerate", "tokenizers")
    with needing(*libraries, what="training", extra="train"):
        importlib.import_module("ergmeter.workloads.sft.trainers").first_imports(config)
        return importlib.import_module("ergmeter.workloads.sft.training")


@contextmanager
def _progress(config: SftConfig, *, quiet: bool) -> Iterator[Callable[..., None]]:
    what = f"{config.model.name} with {config.tuning.backend}"
    if not quiet and not sys.stderr.isatty():
        yield _lines(what)
        return
    with progress_bar(what, quiet=quiet, refresh_per_second=2, time="remaining") as show:

        def tell(step: int, steps: int, loss: float | None) -> None:
            end = "" if loss is None else f"  loss {loss:.3f}"
            show(step, steps, f"step {step} of {steps}{end}")

        yield tell


def _lines(what: str) -> Callable[..., None]:
    """Return a function that prints progress every half minute, for logs."""
    told_s = time.monotonic()

    def tell(step: int, steps: int, loss: float | None) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _LINE_S:
            told_s = time.monotonic()
            end = "" if loss is None else f", loss {loss:.3f}"
            click.echo(f"[train] {what}: step {step} of {steps}{end}", err=True)

    return tell


def _show(outcome: TrainingOutcome, *, report: bool, as_json: bool) -> None:
    if as_json:
        document = {
            "status": outcome.status,
            "saved": str(outcome.output_dir) if outcome.saved else None,
            "run": str(outcome.run) if outcome.run else None,
            "ledger": str(outcome.written.path) if outcome.written else None,
            "problem": outcome.problem or None,
            "row": outcome.row,
        }
        print_json(document)
        return
    if report and outcome.run is not None:
        from rich.console import Console

        from ergmeter.cli.run_options import show_run
        from ergmeter.runlog.reader import Run

        show_run(Console(), Run.open(outcome.run))
    why = f" ({outcome.problem})" if outcome.problem else ""
    saved = f"saved in {outcome.output_dir}" if outcome.saved else "nothing is saved"
    click.echo(f"[train] {outcome.status}{why}; {saved}")
    _tell_of_row(outcome)


def _tell_of_row(outcome: TrainingOutcome) -> None:
    from ergmeter.workloads.sft.ledger import as_text

    if outcome.row is None or outcome.written is None:
        return
    if outcome.written.problem:
        click.echo(f"[train] Warning: the row is not in {outcome.written.problem}", err=True)
    if outcome.written.path is None:
        click.echo("[train] no file could store the row; here it is:", err=True)
        click.echo(as_text(outcome.row), err=True)
    else:
        click.echo(f"[train] Metrics saved to {outcome.written.path}")
    click.echo(f"[train] Metrics: {_figures(outcome.row)}")


def _figures(row: dict[str, object]) -> str:
    """Return SFT-Play's line of metrics; absent ones are marked."""
    names = {
        "tokens_processed": "{:.0f} tokens",
        "tok_per_s": "{:.1f} tok/s",
        "energy_J": "{:.1f} J",
        "J_per_token": "{:.4g} J/token",
    }
    parts = []
    for name, form in names.items():
        value = row.get(name)
        is_there = isinstance(value, int | float)
        parts.append(form.format(value) if is_there else f"no {name}")
    return ", ".join(parts) + (f" ({row['notes']})" if None in map(row.get, names) else "")


def _series(
    configs: list[SftConfig],
    repeats: int,
    options: list[str],
    *,
    out: Path | None,
    cool_down_s: float,
    quiet: bool,
) -> int:
    """Train the configurations in turns. `options`: arguments of each training."""
    from ergmeter.runlog.identity import new_run_path
    from ergmeter.workloads.sft import repeats as series

    for config in configs:
        series.interpreter(config)  # fails now, not after hours of other trainings
    where = out or new_run_path("series")
    plan = list(series.turns(configs, repeats, runs=where))
    done = failed = code = 0
    began_s, took_s = time.monotonic(), dict[Path, float]()
    for number, turn in enumerate(plan):
        if number:
            time.sleep(cool_down_s)
        if not quiet:
            click.echo(f"round {turn.round}: {turn.config.path} (seed {turn.seed})")
        left = [later.config.path for later in plan[number:]]
        times = left.count(turn.config.path)
        turn_s = time.monotonic()
        others_s = turn_s - began_s + sum(took_s.get(p, 0) for p in left if p != turn.config.path)
        code = series.run(turn, [*options, "--in-series", str(times), str(others_s)])
        if code in (_MISUSED, _CANT_FINISH, 130, 143):
            break  # it would stop the others too
        took_s[turn.config.path] = time.monotonic() - turn_s + cool_down_s
        done += code == 0
        failed += code != 0
    runs = f"; runs in {where}" if where.exists() else ""
    click.echo(f"{done} of {len(plan)} trainings finished{runs}")
    if done and len(configs) > 1:
        backends = {config.tuning.backend for config in configs}
        by = "backend" if len(backends) == len(configs) else "config"
        click.echo(f"compare them: erg compare {where} --group-by {by}")
    if code in (_MISUSED, 130, 143):
        return code
    return 1 if failed or code else 0

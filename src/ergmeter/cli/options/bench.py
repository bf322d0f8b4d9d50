"""What `erg bench plan` and `erg bench run` both take: the file, its axes, what to leave out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from ergmeter.bench.execute import nvidia_smi_logger
    from ergmeter.bench.plan.cells import BenchPlan

_Value = TypeVar("_Value")
AGAIN = ("oom", "error", "timeout", "diverged")  # cancelled cells run again in any case

_SMI = "nvidia-smi"  # FMS calls it nvidia


def _time_s(_context: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """As a file of scenarios takes it."""
    from ergmeter.bench.plan.scenarios import seconds

    found = None if text is None else seconds(text)
    if text is not None and not found:
        raise click.BadParameter(f"it takes seconds above 0, or such as 90s, 30m, 2h; got {text}")
    return found


_PLAN_OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("--num-gpus",), {"metavar": "N[,N...]", "help": "GPUs of a cell: an axis of the matrix."}),
    (
        ("--effective-batch-size",),
        {"metavar": "N[,N...]", "help": "Samples of a step over all GPUs: an axis."},
    ),
    (("--max-seq-len",), {"metavar": "N[,N...]", "help": "Longest sequence: an axis."}),
    (("--packing",), {"metavar": "true,false", "help": "Whether sequences are packed: an axis."}),
    (
        ("--only",),
        {"multiple": True, "metavar": "NAME", "help": "Just this scenario. May be repeated."},
    ),
    (
        ("--repeats",),
        {"type": click.IntRange(1, 1000), "help": "Run each cell so many times, in rounds."},
    ),
    (
        ("--command", "workload"),
        {
            "help": "What every cell runs, whatever its scenario says: `erg train`, `sft_trainer`,"
            " or a template of a command."
        },
    ),
    (
        ("--timeout", "timeout_s"),
        {
            "callback": _time_s,
            "metavar": "TIME",
            "help": "End a cell after so long, whatever its scenario says: seconds, 90s, 30m, 2h.",
        },
    ),
    (
        ("--defaults",),
        {"type": click.Path(path_type=Path), "help": "Arguments of all scenarios, as YAML."},
    ),
    (
        ("--contents",),
        {"type": click.Path(path_type=Path), "help": "CONTENTS.yaml: shortnames and their files."},
    ),
    (("--no-data",), {"is_flag": True, "help": "Leave the data stage out."}),
    (
        ("--memory",),
        {
            "type": click.Choice(["nvidia-smi", "nvidia", "huggingface", "all"]),
            "callback": lambda _context, _option, asked: _SMI if asked == "nvidia" else asked,
            "help": "Also log GPU memory: by an nvidia-smi process beside each cell, by the Trainer"
            " (in sft_trainer on unless only nvidia-smi is asked for). NVML is read in any case.",
        },
    ),
)


def plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command all of them."""
    for names, options in reversed(_PLAN_OPTIONS):
        function = click.option(*names, **options)(function)
    return click.argument("scenarios", type=click.Path(path_type=Path))(function)


def planned(given: dict[str, Any]) -> BenchPlan:
    """The plan that was asked for."""
    from ergmeter.bench.plan.plan import plan

    found = plan(
        given["scenarios"],
        num_gpus=_listed("--num-gpus", given["num_gpus"], _whole_number),
        effective_batch_size=_listed(
            "--effective-batch-size", given["effective_batch_size"], _whole_number
        ),
        max_seq_len=_listed("--max-seq-len", given["max_seq_len"], _whole_number),
        packing=_listed("--packing", given["packing"], _truth),
        only=given["only"],
        repeats=given["repeats"],
        command=given["workload"],
        timeout_s=given["timeout_s"],
        defaults=given["defaults"],
        contents=given["contents"],
        data_stage=not given["no_data"],
        log_memory_hf=None if given["memory"] is None else given["memory"] != "nvidia-smi",
        check=wrong,
    )
    for line in found.warnings:
        click.echo(line, err=True)
    return found


def wrong(text: str) -> str | None:
    """What `erg train` would say against a cell's configuration, before anything is started."""
    import tempfile

    from ergmeter.errors import ErgmeterError
    from ergmeter.workloads.sft.config.config import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            load(path)
        except ErgmeterError as error:
            return str(error).removeprefix(f"{path}: ")
    return None


def check_needs(plan: BenchPlan, *, is_error: bool) -> None:
    """Say once what this interpreter lacks for the cells; an error where they run by it."""
    from ergmeter.bench.execute.launching import gpus_here
    from ergmeter.bench.plan.needs import lack
    from ergmeter.errors import PluginError

    lacks = lack(plan.cells, has_gpus=bool(gpus_here()))
    if lacks and is_error:
        raise PluginError(lacks)
    if lacks:
        click.echo(lacks, err=True)


_NOT_AGAIN = ("resume", "move_aside", "rerun", "out")


def going_on(out: Path) -> str:
    """The command that was given, as it goes on with what is in its directory."""
    import shlex

    from ergmeter.runlog.identity import redacted

    context = click.get_current_context()
    words: list[str] = []
    for one in context.command.params:
        name = one.name or ""
        source = context.get_parameter_source(name)
        if source is not click.core.ParameterSource.COMMANDLINE or name in _NOT_AGAIN:
            continue
        value = context.params[name]
        if isinstance(one, click.Option):
            flag = [one.opts[0]]
            words += flag if one.is_flag else []
            listed = value if one.multiple else (value,)
            words += [] if one.is_flag else [word for v in listed for word in (*flag, str(v))]
        else:
            words.append(str(value))
    words = redacted([*context.command_path.split(), *words, "--out", str(out), "--resume"])
    return shlex.join(words)


def again(text: str | None, *, is_resumed: bool) -> tuple[str, ...]:
    """The statuses whose cells are to run again, of --rerun."""
    if text is None:
        return ()
    asked = tuple(text.replace(",", " ").split())
    unknown = [one for one in asked if one not in AGAIN]
    if unknown or not asked:
        raise click.UsageError(f"--rerun takes {', '.join(AGAIN)}, with commas; got {text!r}")
    if not is_resumed:
        raise click.UsageError("--rerun is of cells that have run: give --resume too")
    return asked


_SCHEDULERS = ("slurm", "ray")  # which choose the GPUs, and when a cell starts


def check_launcher(given: dict[str, Any]) -> None:
    """Refuse what was asked for and would have no effect with a scheduler."""
    source = click.get_current_context().get_parameter_source
    names = {"cool_down_s": "--cool-down", "allow_busy": "--allow-busy"}
    for name, option in names.items():
        is_given = source(name) is not click.core.ParameterSource.DEFAULT and given[name]
        if is_given and given["launcher_name"] in _SCHEDULERS:
            raise click.UsageError(
                f"{option} is of the launcher local: with {given['launcher_name']} the scheduler"
                " places the cells; leave it out"
            )


def smi_query(given: dict[str, Any]) -> nvidia_smi_logger.Query | None:
    """What `nvidia-smi` is to log beside the cells; None if it is not asked for."""
    from ergmeter.bench.execute import nvidia_smi_logger

    words, interval_s = given["smi_keywords"], given["smi_interval_s"]
    if given["memory"] not in ("nvidia-smi", "all"):
        if words is not None or interval_s is not None:
            raise click.UsageError(
                "--smi-keywords and --smi-interval are of --memory nvidia-smi, or of all: give it"
            )
        return None
    return nvidia_smi_logger.Query(
        nvidia_smi_logger.KEYWORDS if words is None else nvidia_smi_logger.parsed(words),
        nvidia_smi_logger.INTERVAL_S if interval_s is None else interval_s,
    )


def ask_for_log(out: Path, given: dict[str, Any], query: nvidia_smi_logger.Query | None) -> None:
    """Have the cells of a directory logged; say now if this machine, where they run, can't."""
    from ergmeter.bench.execute import nvidia_smi_logger

    if given["memory"] is None:
        return  # a directory that is taken up again stays as it was asked for
    nvidia_smi_logger.ask(out, query)
    lack = nvidia_smi_logger.lack()
    if query is not None and given["launcher_name"] == "local" and lack:
        click.echo(f"--memory {given['memory']}: {lack}; cells run without its log", err=True)


def statuses(text: str | None) -> tuple[str, ...]:
    """Those of --status; none where it is not given."""
    from ergmeter.bench.execute.outcome import Status

    if text is None:
        return ()
    asked, known = tuple(text.replace(",", " ").split()), get_args(Status)
    if not asked or not set(asked) <= set(known):
        raise click.UsageError(f"--status takes {', '.join(known)}, with commas; got {text!r}")
    return asked


def _listed(option: str, text: str | None, kind: Callable[[str], _Value]) -> list[_Value] | None:
    if text is None:
        return None
    try:
        found = [kind(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise click.UsageError(f"{option}: {error}; got {text!r}") from error
    if not found:
        raise click.UsageError(f"{option} names no value; leave it out or give one")
    return list(dict.fromkeys(found))


def _whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("it takes whole numbers from 1, with commas")
    return int(text)


def _truth(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise ValueError("it takes true and false, with commas")
    return words[text.lower()]

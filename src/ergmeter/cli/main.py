"""The `erg` command: loads the module of one command, and prints errors as one line."""

from __future__ import annotations

import atexit
import gc
import importlib
import keyword
import os
import sys
from typing import Any

import click

from ergmeter.errors import ErgmeterError, suggestion
from ergmeter.version import __version__

# By group, which is the folder of its modules.
_GROUPS = {
    "measure": {
        "record": "Measure any command, without changing it.",
        "demo": "Train a small model for about 20 seconds, measured.",
        "import": "Make a run from a training log.",
        "load": "Send requests to an inference server and measure it.",
        "train": "Fine-tune a model from a YAML file, measured, with a row in the energy ledger.",
        "prepare": "Tokenise a fine-tuning's data and show what is in it.",
        "calibrate": "Measure what this machine can reach, for later runs.",
    },
    "look": {
        "report": "Show a run's metrics: as a card, JSON or a page with charts.",
        "explain": "Show where the rest of the peak went, and what to try.",
        "check": "Check whether a run is fit to be compared.",
        "watch": "Follow a run on a terminal while it is running.",
        "serve": "Show a directory of runs in a browser, live.",
        "plot": "Draw charts of a run as SVG or PNG.",
        "card": "Write a model-card section: metrics, hardware, energy, carbon, a badge.",
        "job": "Show a job that was stopped and resumed: goodput, lost steps, energy.",
    },
    "compare": {
        "compare": "Compare runs or ledgers: ratios with intervals and a verdict.",
        "bench": "Run a matrix of scenarios and compare the results.",
        "gate": "Pass or fail a run or bench against another.",
    },
    "calculate": {
        "mfu": "Calculate MFU from tokens/s.",
        "flops": "Count the FLOPs of a step, by part and by convention.",
        "estimate": "Estimate whether a training fits, its time, energy, carbon and cost.",
        "analyze": "Calculate a Trainium training's metrics: MFU, NKI share, score.",
        "hlo": "Count the multiply-accumulates of compiled modules (XLA, Neuron).",
        "peaks": "List devices with their peak FLOP/s and its source.",
        "grid": "List grids with their carbon intensity and its source.",
        "metrics": "Explain the metrics: formula, unit, needs, other names.",
        "conventions": "Explain the conventions of counting FLOPs.",
    },
    "manage": {
        "list": "List the runs in a directory.",
        "runs": "Tag, annotate, prune, pack, anonymise and collect runs.",
        "export": "Write a run as CSV, Parquet or JSON.",
        "doctor": "Show what this machine can measure, and why the rest can't.",
    },
}
_COMMANDS = {name: group for group, commands in _GROUPS.items() for name in commands}

# What to do after a command, on a terminal. A run's card has its own. RUN is the given one.
_NEXT = {
    "prepare": "erg train CONFIG",
    "load": "erg list; erg serve --open",
    "calibrate": "erg record -- python train.py",
    "explain": "change it, record it again, erg compare RUN OTHER",
    "check": "erg compare RUN OTHER",
    "plot": "erg report RUN --html page.html",
    "job": "erg report RUN, for one of its runs",
    "compare": "erg gate NEW REF, to pass or fail by a rule",
    "bench": "erg bench compare DIRECTORY; erg gate NEW REF",
    "mfu": "erg record -- COMMAND, then erg explain RUN: where the rest of the peak went",
    "flops": "erg mfu MODEL_CONFIG --tokens-per-s N --device NAME",
    "estimate": "erg record -- COMMAND, then erg estimate MODEL_CONFIG --mfu-from RUN",
    "analyze": "erg analyze --compare ANALYSIS OTHER",
    "peaks": "erg mfu MODEL_CONFIG --tokens-per-s N --device NAME",
    "grid": "erg report RUN --grid CODE",
    "metrics": "erg report RUN --metric NAME",
    "conventions": "erg flops MODEL_CONFIG",
    "list": "erg report DIRECTORY/NAME; erg compare DIRECTORY/A DIRECTORY/B; erg serve --open",
    "runs": "erg list",
    "doctor": "erg record -- python train.py",
}
_NOT_FOR_READERS = {"--json", "--md", "--markdown", "--format", "--quiet", "--help", "-h"}


class _Commands(click.Group):
    """Loads a command's module when it is called, so that `erg --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        # No module can be called `import`.
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        module = importlib.import_module(f"ergmeter.cli.{_COMMANDS[cmd_name]}.{name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = suggestion(args[0], _COMMANDS, "did you mean `erg {}`?", cutoff=0.4)
            hint = near or "`erg --help` lists them"
            raise click.UsageError(
                f"no command {args[0]!r}; {hint} (to measure a command: erg record)"
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # From the table: loading every command to ask for its help would load most of ergmeter.
        for group, commands in _GROUPS.items():
            with formatter.section(group.capitalize()):
                formatter.write_dl(list(commands.items()), col_max=12)


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    subcommand_metavar="COMMAND [ARGS]...",  # which click writes in one way or another
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `erg demo`, or put `erg record --` in front of your training command.",
)
@click.version_option(__version__, prog_name="erg")
@click.pass_context
def cli(context: click.Context) -> None:
    """Measure what LLM training and inference gets out of the hardware.

    Tokens per second, step time, joules per token, memory, carbon: every metric states how it was
    obtained, over which window and how sure it is; what can't be measured is absent with
    its reason.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(
    arguments: list[str] | None = None, *, command: click.Command = cli, program: str = "erg"
) -> None:
    """Entry point of the `erg` command, or of one command that is its own `program`."""

    def say(message: str) -> None:
        click.echo(f"{program}: {message}", err=True)

    # What a command has loaded (with torch a million objects) is not searched for garbage when it
    # ends: that takes a second.
    atexit.register(gc.freeze)
    try:
        result: Any = command.main(args=arguments, prog_name=program, standalone_mode=False)
    except click.exceptions.Exit as done:
        result = done.exit_code
    except (click.Abort, KeyboardInterrupt):
        result = 130
    except click.ClickException as error:
        say(error.format_message())
        result = 2 if isinstance(error, click.UsageError) else error.exit_code
    except ErgmeterError as error:
        say(str(error))
        result = error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone; say nothing, and keep Python from saying it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        result = 141
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        say(f"the system refused{where}: {error.strerror or error}")
        result = 1
    words = sys.argv[1:] if arguments is None else arguments
    following = _NEXT.get(words[0]) if words and not result else None
    if following and sys.stderr.isatty() and not _NOT_FOR_READERS.intersection(words):
        run = next(filter(os.path.isdir, words[1:]), "RUN")
        click.echo(click.style(f"next: {following.replace('RUN', run)}", dim=True), err=True)
    sys.exit(result if isinstance(result, int) else 0)

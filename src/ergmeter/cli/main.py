"""The `erg` command: loads the module of one command, and prints errors as one line."""

from __future__ import annotations

import atexit
import gc
import importlib
import keyword
import os
import sys
from pathlib import Path
from typing import Any

import click

from ergmeter.errors import ErgmeterError, suggestion
from ergmeter.version import __version__

_COMMANDS = {
    "record": "Measure any command, without changing it.",
    "import": "Make a run of a training log.",
    "load": "Send requests to an inference server, and say what it made of them.",
    "train": "Fine-tune a model as a YAML file says, measured; a row in the energy ledger.",
    "prepare": "Tokenise a fine-tuning's data and show what is in it.",
    "compare": "Compare runs or ledgers: ratios with intervals, a verdict in words.",
    "bench": "Run a matrix of scenarios and compare what came of it.",
    "gate": "Judge a bench by another: worse than is allowed, or noise?",
    "report": "Show what a run came to: as a card, as JSON or as a page with charts.",
    "serve": "Show a directory of runs in a browser, live while they are written.",
    "plot": "Draw charts of a run into SVG or PNG files.",
    "check": "Say whether a measurement is fit to be compared, and what disturbed it.",
    "explain": "Show where the rest of the peak went, and what is most worth trying.",
    "card": "Write a model-card section: figures, hardware, energy, carbon, a citation, a badge.",
    "watch": "Watch a run while it is running, on a terminal.",
    "list": "List the runs in a directory.",
    "runs": "Tag, annotate, prune, pack, anonymise and collect runs.",
    "job": "Show what a job came to that was stopped and resumed: goodput, lost steps, energy.",
    "export": "Write a run out as CSV, Parquet or JSON.",
    "doctor": "Say what can be measured on this machine, and why the rest can't.",
    "calibrate": "Measure what this machine can reach, for the runs that follow.",
    "flops": "Count the FLOPs of one step of a model, by part and by convention.",
    "mfu": "Say what share of the peak a training got, from printed figures.",
    "conventions": "Explain the ways of counting FLOPs, by name.",
    "hlo": "Count the multiply-accumulates of compiled modules (XLA, Neuron).",
    "analyze": "Calculate the metrics of a Trainium training: MFU, NKI share, score.",
    "estimate": "Estimate whether a training fits, and its time, energy, carbon and cost.",
    "peaks": "List devices with their peak FLOP/s, or show one with its source.",
    "grid": "List grids with the carbon intensity of their electricity, and its source.",
    "metrics": "Explain the metrics: formula, unit, needs, other names.",
    "demo": "Train a small model for about 20 seconds, measured.",
}

_HERE = Path(__file__).parent


class _Commands(click.Group):
    """Loads a command's module when it is called, so that `erg --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        # No module can be called `import`.
        name = f"{cmd_name}_" if keyword.iskeyword(cmd_name) else cmd_name
        folder = next(_HERE.glob(f"*/{name}.py")).parent.name
        module = importlib.import_module(f"ergmeter.cli.{folder}.{name}")
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
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


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

    Tokens per second, step time, joules per token, memory, carbon: every figure says how it was
    obtained, over which window and how sure it is; what can't be measured is absent with
    its reason.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(
    arguments: list[str] | None = None, *, command: click.Command = cli, program: str = "erg"
) -> None:
    """Entry point of the `erg` command, or of one command that goes by a name of its own."""

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
    sys.exit(result if isinstance(result, int) else 0)

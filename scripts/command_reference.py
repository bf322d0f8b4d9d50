"""`python scripts/command_reference.py`: prints docs/commands.md, made from the commands."""

from __future__ import annotations

import click

from ergmeter.cli.main import cli
from ergmeter.cli.options import GroupedCommand

_HEAD = """\
# Commands

This page is made from the commands by `./dev docs`; a test keeps it up to date.

Exit codes: 0 done; 1 failure (a file that is absent, damaged or not understood, such as a
config.json of an unknown architecture; a refused write; a figure that can't be had); 2 misuse (of
options, arguments or typed dimensions); 130 interrupted.
`erg record` exits as its command does: with its code, or 128 plus the signal that killed it.
"""


def page() -> str:
    """Every command's help."""
    context = click.Context(cli, info_name="erg", terminal_width=100, **cli.context_settings)
    parts = [_HEAD, _section("erg", cli.get_help(context))]
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is not None:
            inner = click.Context(command, info_name=name, parent=context, terminal_width=100)
            text = (
                command.full_help(inner)
                if isinstance(command, GroupedCommand)
                else command.get_help(inner)
            )
            parts.append(_section(f"erg {name}", text))
    return "\n".join(parts)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text}\n```\n"


if __name__ == "__main__":
    click.echo(page(), nl=False)

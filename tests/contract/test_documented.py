"""Every command, Python program and YAML file that a page shows is well-formed.

Commands are parsed by the command line itself: command, options and values. Those that take
seconds are also run, by tests/e2e/test_documented.py.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import click
import pytest
import yaml
from scripts import python_reference

from ergmeter.cli.main import cli
from tests.documented import DOCS, PAGES, ROOT, SHELLS, Command, blocks, commands, erg_words

SHOWN = [(page, command) for page in PAGES for command in commands(page)]
ERG = [(command, words) for _, command in SHOWN if (words := erg_words(command)) is not None]
OURS = ("examples", "scripts", "bench", "tests", "scenarios", "configs")


def parse(words: tuple[str, ...]) -> None:
    """Parse the arguments of `erg` as it does. Raises a click exception for what it refuses."""
    rest = list(words)
    command: click.Command = cli
    context = click.Context(cli, info_name="erg", **cli.context_settings)
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        found = command.get_command(context, name)
        if found is None:
            raise click.UsageError(f"no command {name!r}")
        context, command = click.Context(found, info_name=name, parent=context), found
    command.make_context(context.info_name, rest, parent=context.parent)


@pytest.mark.parametrize(("command", "words"), ERG, ids=lambda value: str(value)[:90])
def test_a_command_of_a_page_is_one(command: Command, words: tuple[str, ...]) -> None:
    try:
        parse(words)
    except click.exceptions.Exit:
        pass  # --help
    except click.ClickException as error:
        pytest.fail(f"{command}: {error.format_message()}")


def test_a_command_that_is_none_is_refused() -> None:
    with pytest.raises(click.NoSuchOption):
        parse(("report", "RUN", "--allright"))
    with pytest.raises(click.UsageError):
        parse(("bench", "erport"))
    with pytest.raises(click.BadParameter):
        parse(("report", "RUN", "--warmup-steps", "few"))


def test_pages_have_as_many_commands_as_they_seem_to() -> None:
    """So that the parser of pages misses none."""
    texts = "\n".join(
        block.text for page in PAGES for block in blocks(page) if block.language in SHELLS
    )
    assert len(ERG) >= len(re.findall(r"^(?:\$ )?erg ", texts, re.MULTILINE)) > 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_stand_in_blocks_of_a_shell(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^ {4}(?:\$ )?(?:erg|\./dev) .*", text, re.MULTILINE) == []
    others = [block for block in blocks(page) if block.language not in (*SHELLS, "text", "yaml")]
    lines = [line for block in others for line in block.text.splitlines()]
    assert [line for line in lines if line.startswith(("$ ", "erg ", "./dev "))] == []


def inline_commands() -> list[tuple[str, list[str]]]:
    """What pages name of `erg` within a sentence, up to what belongs to a recorded program."""
    found = []
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # history names options as they were
            continue
        text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for code in re.findall(r"(?<!`)`(erg [^`]+)`(?!`)", text):
            words = code.replace("|", " ").replace("COMMAND", "").split()[1:]
            stop = words.index("--") if "--" in words else len(words)
            found.append((f"{page.name}: {code}", words[:stop]))
    return found


def test_commands_and_options_within_sentences_are_there() -> None:
    unknown = []
    shown = inline_commands()
    assert len(shown) > 300
    for place, words in shown:
        command: click.Command = cli
        context = click.Context(cli, info_name="erg", **cli.context_settings)
        rest = list(words)
        while isinstance(command, click.Group) and rest and rest[0].isalpha():
            found = command.get_command(context, rest.pop(0))
            if found is None:
                unknown.append(place)
                break
            command = found
        else:
            options = {name for one in command.get_params(context) for name in one.opts}
            options |= {name for one in command.get_params(context) for name in one.secondary_opts}
            given = {word.partition("=")[0].rstrip(",.)") for word in rest if word.startswith("-")}
            numbers = {word for word in given if re.match(r"-\d", word)}
            unknown += [f"{place}: {name}" for name in given - numbers - options - {"-h", "--help"}]
    assert unknown == []


def test_a_job_of_dev_is_there() -> None:
    jobs = set(re.findall(r"#   \./dev (\w+)", (ROOT / "dev").read_text())) | {"train-unsloth"}
    asked = {c.words[1] for _, c in SHOWN if c.words[0] == "./dev" and len(c.words) > 1}
    assert {"test", "lint", "docs", "demo"} <= asked <= jobs


def test_a_target_of_make_is_there() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {command.words[1] for _, command in SHOWN if command.words[0] == "make"}
    assert {"process", "compare"} <= asked <= targets


def test_files_of_the_repository_that_a_command_names_are_there() -> None:
    named = {
        word
        for page, command in SHOWN
        for word in command.words
        if re.fullmatch(rf"(?:\./)?(?:{'|'.join(OURS)})/[\w./-]+", word)
        and page.name != "CHANGELOG.md"
    }
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def python_blocks() -> list[tuple[str, str]]:
    return [
        (block.place, block.text)
        for page in (*PAGES, DOCS / "commands.md")
        for block in blocks(page)
        if block.language == "python" and page.name != "python-api.md"
    ]


@pytest.mark.parametrize(("place", "text"), python_blocks(), ids=lambda value: value[:40])
def test_python_of_a_page_compiles_and_what_it_imports_is_there(place: str, text: str) -> None:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ergmeter"):
            for alias in node.names:
                assert is_there(node.module or "", alias.name), f"{place}: {alias.name}"


def is_there(name: str, member: str) -> bool:
    """Whether a module has this name. Modules of a framework are read and not imported."""
    if name.startswith("ergmeter.integrations."):
        place = name.removeprefix("ergmeter.")
        source = python_reference.module(place)
        if "ergmeter.compat" in source.source:
            (compat,) = re.findall(r"from ergmeter\.compat\.(\w+) import \*", source.source)
            source = python_reference.module(f"compat.{compat}")
        return python_reference.find(source, member) is not None
    return hasattr(importlib.import_module(name), member)


def test_yaml_of_a_page_is_yaml() -> None:
    texts = [b for page in PAGES for b in blocks(page) if b.language in ("yaml", "yml")]
    assert len(texts) > 5
    for block in texts:
        assert yaml.safe_load(block.text) is not None, block.place

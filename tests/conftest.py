"""Which tests run by default, and how long each file took."""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from _pytest.terminal import TerminalReporter

# No test asserts an absolute time: a busy machine makes any example slow.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# What a marked test needs or costs beyond plain Python. `./dev test --all` runs these too.
LEFT_OUT = ("browser", "cluster", "frameworks", "soak")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ergmeter")
    group.addoption("--all", action="store_true", help=f"also run tests marked {LEFT_OUT}")
    group.addoption("--file-times", action="store_true", help="print the seconds of each test file")


def runs_everything(config: pytest.Config) -> bool:
    """Whether no files or tests are named."""
    return config.args_source is pytest.Config.ArgsSource.TESTPATHS


def leaves_out(config: pytest.Config) -> bool:
    """Whether marked tests are left out: not with --all, nor where files or tests are named."""
    return runs_everything(config) and not config.getoption("--all")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if leaves_out(config):
        is_left_out = [any(item.get_closest_marker(name) for name in LEFT_OUT) for item in items]
        config.hook.pytest_deselected(
            items=[item for item, out in zip(items, is_left_out, strict=True) if out]
        )
        items[:] = [item for item, out in zip(items, is_left_out, strict=True) if not out]
    if runs_everything(config):
        places = _mixed(list(dict.fromkeys(item.path for item in items)))
        items.sort(key=lambda item: places[item.path])


def _mixed(paths: list[Path]) -> dict[Path, float]:
    """The order of files: end-to-end tests, which often wait, spread evenly among the others."""
    groups: dict[bool, list[Path]] = {True: [], False: []}
    for path in paths:
        groups["e2e" in path.parts].append(path)
    return {path: n / len(group) for group in groups.values() for n, path in enumerate(group)}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector from scanning the loaded modules while more are loaded."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep it from scanning them again and again."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Nor need it look for garbage when everything ends."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--file-times"):
        seconds = defaultdict[str, float](float)
        for reports in terminalreporter.stats.values():
            for report in reports:
                if isinstance(report, pytest.TestReport):
                    seconds[report.nodeid.partition("::")[0]] += report.duration
        terminalreporter.section("seconds of each file")
        for path, file_s in sorted(seconds.items(), key=lambda row: -row[1]):
            terminalreporter.write_line(f"{file_s:8.1f}  {path}")
    if leaves_out(config):
        names = ", ".join(LEFT_OUT)
        terminalreporter.write_line(f"left out: tests marked {names}; `./dev test --all` runs them")

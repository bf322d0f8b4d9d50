"""Where a directory is, by itself and not by its name."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import click
import pytest

from ergmeter.bench.execute.state import Gone, OpenDirectory
from ergmeter.cli.main import main


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_does_not_answer_is_no_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It says nothing of where the directory is, and answers again later."""

    def refused(_: Path) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    cell = tmp_path / "exp_1"
    cell.mkdir()
    with OpenDirectory(cell) as place:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "stat", refused)
            assert place.has_moved is False
            assert place.path == cell
        shutil.rmtree(cell)
        with pytest.raises(Gone, match="was moved or deleted"):
            _ = place.path


def test_a_directory_that_is_gone_is_told_without_blame(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @click.command()
    def gone() -> None:
        raise Gone("results was moved or deleted; nothing more is written for it")

    with pytest.raises(SystemExit) as ended:
        main([], command=gone)
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "erg: results was moved or deleted; nothing more is written for it\n"
    )

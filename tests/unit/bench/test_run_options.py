"""Options of `erg bench run` that a launcher has no use for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Erg = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("launcher", ["slurm", "ray"])
@pytest.mark.parametrize("options", [["--cool-down", "30"], ["--allow-busy"]])
def test_what_has_no_effect_with_a_scheduler_is_refused(
    erg: Erg, tmp_path: Path, launcher: str, options: list[str]
) -> None:
    (tmp_path / "s.yaml").write_text("scenarios: [{name: a, command: 'true', arguments: {}}]\n")
    words = ("bench", "run", tmp_path / "s.yaml", "--out", tmp_path / "out", "--dry-run")
    code, _, err = erg(*words, "--launcher", launcher, *options)
    assert code == 2
    said = " ".join(err.split())
    assert f"{options[0]} is for the launcher local: with {launcher} the scheduler places" in said
    assert erg(*words, "--launcher", launcher)[0] == 0  # the default is no wish
    assert erg(*words, "--launcher", launcher, "--cool-down", 0)[0] == 0
    assert erg(*words, "--launcher", "local", *options)[0] == 0

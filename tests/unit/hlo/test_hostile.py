"""Files that are damaged or made to hurt: one verdict by all readers, little time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.hlo.crafted import CRAFTED
from tests.unit.hlo.readers import READERS

ROOT = Path(__file__).parents[3]
FILES = 1500


def examined(module: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", f"tests.unit.hlo.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_damaged_modules_are_refused_or_counted_by_all_readers_alike() -> None:
    found = examined("hostile", str(FILES))
    assert not found["faults"]
    assert found["said"]["damaged"] > FILES // 4
    assert found["said"]["counted"] > FILES // 10


@pytest.fixture(scope="module")
def verdicts() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = examined("crafted")
    return found


@pytest.mark.parametrize("name", CRAFTED)
def test_a_file_made_to_hurt_is_counted_rightly_or_refused(
    verdicts: dict[str, dict[str, Any]], name: str
) -> None:
    _, macs = CRAFTED[name]()
    row = verdicts[name]
    expected = "damaged: " if macs is None else str(macs)
    assert all(row[reader].startswith(expected) for reader in READERS), row
    assert len({row[reader] for reader in READERS}) == 1, row
    assert all(row[f"{reader}_share"] < 1 for reader in READERS), row

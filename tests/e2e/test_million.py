"""Very many steps cost no more memory than two thirds of them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.soak

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(600)
def test_memory_is_flat_over_very_many_steps_with_a_sink(lab: Lab) -> None:
    done = lab.run(*script("million", "run"), timeout_s=500)
    assert done.returncode == 0, done.stderr.decode()
    middle, late = (int(line) * 1024 for line in done.stdout.split())
    # The least of each third is taken: files come and go by 31 250 rows, and their rows with them.
    # Kept in memory, the steps of a third would be 38 MB; a small dictionary for each is 47.
    assert late - middle < 20 * MIB
    readings = lab.report()["readings"]
    assert readings["steps.count"]["value"] == 250_000
    assert readings["tokens.total"]["value"] == 6 * 250_000
    written = (lab.path / "run" / "figures.jsonl").read_text()
    rows = [json.loads(line) for line in written.splitlines()]
    assert rows[-1]["step"] == 250_000

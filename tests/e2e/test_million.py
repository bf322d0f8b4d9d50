"""Very many steps cost no more memory than half of them."""

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
    early, late = (int(line) * 1024 for line in done.stdout.split())
    # The least of each quarter is taken: files come and go by 31 250 rows, and their rows with them
    # (up to 25 MB from one to the next). Kept in memory, the steps between would be 90 MB or more.
    assert late - early < 45 * MIB
    readings = lab.report()["readings"]
    assert readings["steps.count"]["value"] == 400_000
    assert readings["tokens.total"]["value"] == 6 * 400_000
    written = (lab.path / "run" / "figures.jsonl").read_text()
    rows = [json.loads(line) for line in written.splitlines()]
    assert rows[-1]["step"] == 400_000

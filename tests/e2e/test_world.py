"""Which processes are one training: those of a group, and of no other group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import script
from tests.ports import free_port

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks


def test_ranks_of_a_group_agree_and_groups_side_by_side_or_in_turn_do_not(lab: Lab) -> None:
    one = lab.start(*script("spawned", "one", free_port(), 2))
    other = lab.start(*script("spawned", "other", free_port(), 1))
    assert one.wait(90) == other.wait(90) == 0
    ids = set()
    for group in ("one-0", "one-1", "other-0"):
        first, second = (
            json.loads((lab.path / f"{group}-{rank}.json").read_text()) for rank in (0, 1)
        )
        assert first["world"] == second["world"] == 2
        assert first["id"] == second["id"]
        ids.add(first["id"])
    assert len(ids) == 3

"""Every command prints what it printed before, byte for byte."""

from __future__ import annotations

import pytest

from tests.golden import expected
from tests.golden.corpus import cases
from tests.golden.running import Case, Runner


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("golden") / "work")


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_the_output_is_the_stored_one(case: Case, runner: Runner) -> None:
    difference = expected.difference(case.name, runner.run(case))
    assert not difference, difference


def test_every_stored_output_has_a_case() -> None:
    names = {case.name for case in cases()}
    assert {path.stem for path in expected.FOLDER.glob("*.txt")} == names

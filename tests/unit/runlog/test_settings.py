"""What a user may declare of a run, and what is refused at once."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.runlog.settings import Settings


def test_a_device_is_kept_as_it_was_named() -> None:
    found = Settings.declared(None, {"device": "h100-sxm", "dtype": "bf16"})
    assert found.as_json() == {"device": "h100-sxm", "dtype": "bf16"}
    assert Settings.declared(None, {"device": "A100"}).device == "A100"  # of several; some agree


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("h300", "no row of the hardware table is named 'h300'; `erg peaks` lists them"),
        (0, "device must be a name, as `erg peaks` lists them; got 0"),
    ],
)
def test_a_device_there_is_not_is_refused_when_it_is_declared(device: object, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Settings.declared(None, {"device": device})
    assert str(refused.value).startswith(said)


def test_a_run_of_another_machine_may_name_a_row_that_is_not_here() -> None:
    assert Settings(device="their-own-card").device == "their-own-card"

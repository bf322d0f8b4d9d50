"""A script with the callback and the same script, untouched, under `erg record`: one answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks


def truth(out: bytes) -> dict[str, Any]:
    [line] = [line for line in out.decode().splitlines() if line.startswith("TRUTH ")]
    found: dict[str, Any] = json.loads(line.removeprefix("TRUTH "))
    return found


def test_the_hook_and_the_callback_say_the_same_of_one_script(lab: Lab) -> None:
    own_line = lab.run(*script("hf_either_way", "callback"))
    assert own_line.returncode == 0, own_line.stderr.decode()
    options = ("--quiet", "--warmup-steps", "3")
    untouched = lab.record(*script("hf_either_way"), out="hook", options=options)
    assert untouched.returncode == 0, untouched.stderr.decode()
    ways = [
        (lab.report("callback"), truth(own_line.stdout)),
        (lab.report("hook"), truth(untouched.stdout)),
    ]
    shares = []
    for report, own in ways:
        readings = report["readings"]
        assert readings["tokens.total"]["value"] == own["tokens"]
        assert readings["steps.count"]["value"] == 37
        # Two runs of one machine differ by more than two ways of measuring: each by its own clock.
        rate, (least_s, most_s) = readings["throughput.tokens_per_s"]["value"], bounds_s([own])
        assert own["tokens"] / most_s <= rate <= own["tokens"] / least_s
        # MFU goes with tokens/s: of the same run, its FLOPs a token are what can differ.
        shares.append(readings["utilization.mfu_frac"]["value"] / rate)
    assert shares[0] == pytest.approx(shares[1], rel=1e-9)
    parameters = {report["settings"]["parameters"] for report, _ in ways}
    assert len(parameters) == 1

"""Lightning's Trainer, real, on 1 and 2 devices: its own count beside what a callback told."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import ERG, QUICK, needs, script
from tests.e2e.told import steps, sums, trainings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

needs("lightning")

STEPS, MICRO = 12, 4
FIT = "lightning_trainer"
_CHANCE = re.compile(rb"\d+(\.\d+)? ?s\b")
HOW = ("plain", "metered")


def fitted(lab: Lab, name: str, how: str, *more: object, recorded: bool = False) -> bytes:
    command = script(FIT, name, how, *more)
    if recorded:
        command = [ERG, "record", *QUICK, "--out", f"{name}-run", "--", *command]
    done = lab.run(*command)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout + done.stderr


def means(losses: list[float]) -> list[float]:
    """Of each step, over its micro-batches: what is trained on."""
    return [sum(losses[at : at + MICRO]) / MICRO for at in range(0, len(losses), MICRO)]


def truth(lab: Lab, name: str, ranks: int = 1) -> list[dict[str, Any]]:
    return [json.loads((lab.path / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def check(lab: Lab, run: Path, own: list[dict[str, Any]]) -> None:
    """Tokens, steps, losses, times and parameters, each against the program's own."""
    for rank, said in enumerate(own):
        rows = steps(run, rank=rank)
        assert rows["index"] == list(range(STEPS))
        assert rows["micro_steps"] == [MICRO] * STEPS
        assert rows["tokens_computed"] == sums(said["computed"], MICRO)
        assert rows["tokens_real"] == sums(said["real"], MICRO)
        # The first of each row bears no loss: the model compares it with nothing.
        assert sum(rows["tokens_loss"]) == sum(said["real"]) - 4 * MICRO * STEPS
        assert rows["loss"] == pytest.approx(means(said["losses"]), rel=1e-6)
        assert rows["learning_rate"] == [1e-3] * STEPS
    readings = lab.report(str(run.relative_to(lab.path)))["readings"]
    least_s, most_s = bounds_s(own)
    tokens = sum(sum(one["real"]) for one in own)
    assert readings["steps.count"]["value"] == STEPS
    assert readings["tokens.total"]["value"] == tokens
    assert tokens / most_s <= readings["throughput.tokens_per_s"]["value"] <= tokens / least_s
    for name in ("eval_s", "checkpoint_s"):  # of the rank that took longest
        within_s, in_all_s = (max(one[name][at] for one in own) for at in (0, 1))
        assert 0 < within_s <= readings[f"time.{name}"]["value"] <= in_all_s
    for one in trainings(run):
        assert one["world"] == len(own)
        assert one["parameters"] == one["parameters_trained"] == own[0]["parameters"]


def test_a_callback_sees_steps_tokens_losses_evaluation_and_checkpoints(lab: Lab) -> None:
    alone = fitted(lab, "alone", "plain")
    within = fitted(lab, "within", "metered")
    assert _CHANCE.sub(b"TIME", within) == _CHANCE.sub(b"TIME", alone)
    own = truth(lab, "within")
    assert own[0]["losses"] == truth(lab, "alone")[0]["losses"]
    assert len(own[0]["losses"]) == STEPS * MICRO
    (run,) = lab.runs()  # though the callback is there twice
    check(lab, run, own)
    assert "compute.model_flops_per_token" in lab.report(str(run))["readings"]


def test_two_devices_without_torchrun_are_one_training_of_two_ranks(lab: Lab) -> None:
    fitted(lab, "alone", "plain", "ddp", 2)
    fitted(lab, "within", "metered", "ddp", 2)
    own = truth(lab, "within", 2)
    assert [one["losses"] for one in own] == [one["losses"] for one in truth(lab, "alone", 2)]
    (run,) = lab.runs()
    check(lab, run, own)
    first, second = trainings(run)
    assert first["id"] == second["id"]


def test_a_loop_of_fabric_is_seen_by_one_line(lab: Lab) -> None:
    done = lab.run(*script("fabric_loop", *HOW))
    assert done.returncode == 0, done.stderr.decode()
    alone, own = (json.loads((lab.path / f"{how}.json").read_text()) for how in HOW)
    assert own["losses"] == alone["losses"]
    (run,) = lab.runs()
    rows = steps(run)
    assert rows["index"] == list(range(20))
    assert rows["micro_steps"] == [MICRO] * 20
    assert rows["tokens_computed"] == sums(own["computed"], MICRO)
    assert rows["tokens_real"] == sums(own["real"], MICRO)
    assert rows["loss"] == own["losses"][MICRO - 1 :: MICRO]  # of the last, as it was told
    assert trainings(run)[0]["parameters"] == own["parameters"]
    readings = lab.report(str(run))["readings"]
    within_s, in_all_s = own["eval_s"]
    assert within_s <= readings["time.eval_s"]["value"] <= in_all_s
    (least_s, most_s), tokens = bounds_s([own]), sum(own["real"])
    assert tokens / most_s <= readings["throughput.tokens_per_s"]["value"] <= tokens / least_s

"""A loop of JAX with Flax and optax: its own count beside what one line told of it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import needs, script
from tests.e2e.recorded_steps import steps, sums, trainings

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

needs("flax")
needs("optax")

BATCHES, MICRO, BATCH, LENGTH, VOCABULARY, WIDTH, LAYERS = 80, 2, 4, 32, 128, 32, 3
HOW = ("plain", "metered")


def test_a_jax_loop_is_told_with_its_tokens_losses_and_flops(lab: Lab) -> None:
    done = lab.run(*script("jax_loop", *HOW))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout + done.stderr == b""
    alone, own = (json.loads((lab.path / f"{how}.json").read_text()) for how in HOW)
    assert own["losses"] == alone["losses"]
    (run,) = lab.runs()
    rows = steps(run)
    assert rows["index"] == list(range(BATCHES // MICRO))
    assert rows["tokens_computed"] == sums(own["computed"], MICRO)
    assert rows["tokens_real"] == sums(own["real"], MICRO)
    assert rows["loss"] == own["losses"][MICRO - 1 :: MICRO]
    assert len(steps(run, phase="data")["index"]) == BATCHES

    readings: dict[str, Any] = lab.report(str(run))["readings"]
    rate = readings["throughput.tokens_per_s"]["value"]
    (least_s, most_s), tokens = bounds_s([own]), sum(own["real"])
    assert tokens / most_s <= rate <= tokens / least_s
    (head,) = run.glob("*/writer.json")
    said = json.loads(head.read_text())
    assert said["settings"]["parameters"] == own["parameters"]
    assert trainings(run)[0]["world"] == 1
    # By hand: two for each weight of a product and token, and the scores and their sums; a
    # backward pass is twice that. XLA takes the scanned layer once, and less than that is wrong.
    weights = LAYERS * (4 * WIDTH * WIDTH + 8 * WIDTH * WIDTH) + WIDTH * VOCABULARY
    scores = LAYERS * BATCH * 4 * LENGTH * LENGTH * WIDTH
    by_hand = 3 * (2 * weights * BATCH * LENGTH + scores)
    (flops,) = said["flops"]
    assert flops["model_per_step"] == by_hand > own["xla_flops"]
    assert flops["tokens_per_step"] == BATCH * LENGTH
    marks = (head.parent / "marks.jsonl").read_text()
    assert "step times are the host's" in marks

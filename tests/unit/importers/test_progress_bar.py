"""Bars as tqdm draws them, wide or narrow, and training loops that print nothing else."""

from __future__ import annotations

import pytest

from ergmeter.importers.engine.progress_bar import bar
from ergmeter.importers.keyvalue import KeyValueImporter
from tests.unit.importers.captured import marks, steps
from tests.unit.importers.printed import live

DRESSED = [
    " 58%|█████▊    | {0}/12 [00:01<00:00,  5.4it/s, loss={1}]",
    "  {0}/12 [00:01<00:00,  5.4it/s, loss={1}]",
    "{0}it [00:01,  5.4it/s, loss={1}]",
    "Epoch 1: {0}/12 [1:00:01<2:00:00,  5.4s/it, loss={1}]",
]


@pytest.mark.parametrize("drawn", DRESSED)
def test_a_loop_that_draws_a_bar_with_its_loss_has_its_steps_over_the_epochs(drawn: str) -> None:
    # Each is drawn when the count rises, and again when the loss is set.
    log, t = [], 0.0
    for epoch in range(3):
        for n in range(13):
            t += 0.25 if n else 0.0
            log += [(t, drawn.format(n, 3 - epoch)), (t + 0.001, drawn.format(n, 2.5 - epoch / 2))]
    records = live(*log)
    assert sum(s.steps or 0 for s in steps(records)) == 36
    assert {round(s.window.duration_s, 3) for s in steps(records)} <= {0.25, 0.249}
    assert marks(records, "restarted") == marks(records, "several_programs") == []
    assert KeyValueImporter().recognises([drawn.format(7, 2.31)])


@pytest.mark.parametrize(
    "text",
    [
        "Evaluating: 3/12 [00:01<00:00,  5.4it/s, loss=2.1]",
        "val: 3it [00:01,  5.4it/s, loss=2.1]",
        "3/12 [00:01<00:00,  5.4it/s]",
        "3/500 [=>....] - ETA: 10s - loss: 2.3",
        "page 3/12 [draft], loss=2",
        "10.5it [00:01, loss=2]",
        "2026-11-15 3/12 [10:00:01] loss: 2",
    ],
)
def test_what_is_no_bar_of_training_with_a_loss_makes_no_step(text: str) -> None:
    assert not KeyValueImporter().recognises([text])


def test_a_bar_without_a_total_has_none() -> None:
    found = bar("7it [00:01,  5.4it/s]")
    assert found is not None
    assert (found.n, found.total) == (7, None)

"""Tokens of ranks that share their work are counted once, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ergmeter.metrics.definitions.tokens import positions_per_token
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Flops, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import add_writer, make_run, reading, reason

S = 10**9
STEPS = 10


def run_of_ranks(
    path: Path, *tokens: int | None, headers: dict[int, dict[str, Any]] | None = None, **also: Any
) -> Run:
    """A run in which each rank tells so many tokens a step, ten steps of a second."""
    run = make_run(path)
    for rank, each in enumerate(tokens):
        steps = [
            Step(i * S, (i + 1) * S, index=i, tokens_computed=each, samples=2, rank=rank)
            for i in range(STEPS)
        ]
        header = {"world": len(tokens), **(headers or {}).get(rank, {})}
        add_writer(run, steps=steps, header=header, **also)
    return Run.open(run)


def told(**at: tuple[int, int]) -> dict[str, Any]:
    return {"layout": {"at": {name: list(where) for name, where in at.items()}, "from": "mesh"}}


@pytest.mark.parametrize(
    ("layout", "a_step", "samples"),
    [
        (None, 1280, 16),  # data-parallel: 4 x 200 + 4 x 120
        ("tp=2", 640, 8),  # pairs 01 23 45 67, each counted once
        ("pp=2", 800, 8),  # 04 15 26 37: of each two the one that tells more
        ("tp=2,pp=2", 400, 4),  # 0145 and 2367
        ("tp=4,pp=2", 200, 2),  # all eight
        ("cp=2", 1280, 8),  # parts of the same sequences
        ("tp=2,cp=2,pp=2", 400, 2),
        ("ep=8", 1280, 16),
        ("tp=2,pp=2,order=tp-pp-dp", 320, 4),  # 0123 and 4567
    ],
)
def test_each_group_of_ranks_that_share_their_tokens_counts_once(
    tmp_path: Path, layout: str | None, a_step: int, samples: int
) -> None:
    run = run_of_ranks(tmp_path / "run", 200, 200, 200, 200, 120, 120, 120, 120)
    said = {"layout": layout} if layout else {}
    assert reading(run, "tokens.per_step", **said).value == a_step
    assert reading(run, "tokens.total", **said).value == a_step * STEPS
    assert reading(run, "throughput.tokens_per_s", **said).value == pytest.approx(a_step)
    assert reading(run, "throughput.computed_tokens_per_s", **said).value == pytest.approx(a_step)
    assert reading(run, "throughput.samples_per_s", **said).value == pytest.approx(samples)
    assert reading(run, "steps.count", **said).value == STEPS


def test_mfu_takes_the_same_tokens(tmp_path: Path) -> None:
    """1 GFLOP a token, 400 tokens/s on 8 devices of 1 TFLOP/s: 5 %."""
    run = run_of_ranks(tmp_path / "run", *[200] * 8)
    flops = Flops(1e9 * 400, "6N", "analytic", tokens_per_step=400)
    found = summarize(
        run, Settings(peak_flops_per_s=1e12, num_devices=8, layout="tp=2,pp=2"), flops=[flops]
    ).readings["utilization.mfu_frac"]
    assert getattr(found, "value", found) == pytest.approx(0.05)


def test_stages_of_a_pipeline_that_get_no_batch_are_not_missed(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path / "run", 100, 100, None, None)
    assert "20 of 40 steps have no count of computed tokens" in reason(run, "tokens.total")
    assert reading(run, "tokens.total", layout="pp=2").value == 2000
    assert reading(run, "tokens.total", layout="pp=2,tp=2").value == 1000


def test_a_rank_that_was_killed_does_not_take_its_groups_tokens_with_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank, steps in enumerate((3, 10, 10, 10)):
        rows = [Step(i * S, (i + 1) * S, tokens_computed=50, rank=rank) for i in range(steps)]
        add_writer(run, steps=rows, header={"world": 4})
    opened = Run.open(run)
    assert reading(opened, "tokens.total", layout="tp=2").value == 2 * 10 * 50
    assert reading(opened, "tokens.total").value == 33 * 50


def test_where_a_framework_says_where_each_rank_stands_it_need_not_be_declared(
    tmp_path: Path,
) -> None:
    """Neighbours along dp, as no order of Megatron's would have it."""
    headers = {rank: told(tp=(rank // 2, 2), dp=(rank % 2, 2)) for rank in range(4)}
    run = run_of_ranks(tmp_path / "run", 100, 70, 100, 70, headers=headers)
    found = reading(run, "tokens.total")
    assert found.value == 170 * STEPS
    said = "2 of 4 ranks, which share theirs with the others (tp=2,dp=2 by the framework's word)"
    assert said in found.note
    assert reading(run, "tokens.total", layout="dp=4").value == 340 * STEPS


def test_ranks_that_each_count_whole_sequences_count_once_where_the_context_is_cut(
    tmp_path: Path,
) -> None:
    """A Trainer hands the same batch to all context-parallel ranks, and cuts it afterwards."""
    headers: dict[int, Any] = {rank: told(cp=(rank % 2, 2), dp=(rank // 2, 2)) for rank in range(4)}
    parts = run_of_ranks(tmp_path / "parts", 100, 100, 70, 70, headers=headers)
    assert reading(parts, "tokens.per_step").value == 340
    whole = {rank: {**one, "whole_sequences": True} for rank, one in headers.items()}
    run = run_of_ranks(tmp_path / "whole", 100, 100, 70, 70, headers=whole)
    assert reading(run, "tokens.per_step").value == 170
    assert "2 of 4 ranks, which share theirs" in reading(run, "tokens.total").note
    assert reading(run, "throughput.samples_per_s").value == pytest.approx(4)


def test_padding_is_that_of_the_ranks_that_tell_it(tmp_path: Path) -> None:
    """Stage 0 of two is given the batch, half of it padding."""
    run = make_run(tmp_path / "run")
    stages: list[dict[str, Any]] = [{"tokens_computed": 100, "tokens_real": 50}, {}]
    for rank, counts in enumerate(stages):
        rows = [Step(i * S, (i + 1) * S, index=i, rank=rank, **counts) for i in range(STEPS)]
        add_writer(run, steps=rows, header={"world": 2}, settings={"layout": "pp=2"})
    assert positions_per_token(evidence_of(Run.open(run))) == 2.0


def test_where_the_framework_could_not_say_who_shares_tokens_their_sum_is_not_guessed(
    tmp_path: Path,
) -> None:
    unknown = {"layout": {"unknown": "Megatron places 4 of 8 ranks", "from": "Megatron"}}
    run = run_of_ranks(tmp_path / "run", *[100] * 8, headers=dict.fromkeys(range(8), unknown))
    said = reason(run, "tokens.total")
    assert "Megatron places 4 of 8 ranks" in said
    assert "--layout" in said
    assert reading(run, "tokens.per_step", layout="tp=2").value == 400


def test_a_place_among_some_of_the_ranks_is_no_place(tmp_path: Path) -> None:
    """Pairs with meshes of their own, as older runs have them: 2 x 100 and not 100."""
    headers = {rank: told(tp=(rank % 2, 2)) for rank in range(4)}
    run = run_of_ranks(tmp_path / "run", 100, 100, 100, 100, headers=headers)
    assert "places 2 of the 4 ranks (tp=2)" in reason(run, "tokens.total")
    assert reading(run, "tokens.per_step", layout="tp=2").value == 200


def test_ranks_that_should_tell_the_same_and_do_not_are_named(tmp_path: Path) -> None:
    run = run_of_ranks(tmp_path / "run", 100, 70, settings={"layout": "tp=2"})
    assert any("ranks 1 and 0 share their tokens by the layout" in n for n in summarize(run).notes)
    same = run_of_ranks(tmp_path / "same", 100, 100, settings={"layout": "tp=2"})
    assert not any("laid out" in note for note in summarize(same).notes)

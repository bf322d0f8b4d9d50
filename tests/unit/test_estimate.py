"""Time, energy, carbon and cost from what was stated; and whether there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ergmeter.errors import UsageError
from ergmeter.flops.batch import Batch
from ergmeter.flops.estimate.estimate import (
    AS_ASKED,
    BATCH_MAX,
    CARBON,
    COST,
    DURATION,
    ENERGY,
    MICRO_BATCH_MAX,
    MOST_SEQUENCES,
    PEAK,
    SEQUENCES_MAX,
    SPARE,
    STEP,
    TOKENS_PER_S,
    Room,
    TrainingJob,
    TrainingPlan,
    memory_results,
    micro_batch_max,
    plan_results,
    serving,
    serving_results,
    verdict,
    ways,
)
from ergmeter.flops.estimate.memory import Parallel, Setup, step_memory
from ergmeter.flops.estimate.storage import plain
from ergmeter.flops.source import read_graph
from ergmeter.flops.work import TrainedParts
from ergmeter.metrics.definitions.peaks import Peak
from ergmeter.records import Flops, Missing, Reading

PETA = Peak("a card", "bf16", 1e15, "its datasheet", "reported")
STEP_FLOPS = Flops(
    model_per_step=4e15, convention="exact", engine="analytic", tokens_per_step=100_000
)
STATED = TrainingPlan(
    devices=8,
    tokens=3.6e9,
    mfu=0.5,
    watts=500,
    grid_g_per_kwh=200,
    grid_source="the operator",
    pue=1.25,
    price_per_hour=2,
    currency="EUR",
)
SMALL = "hidden=64,layers=2,ffn=176,heads=4,vocab=500"


def value(found: object) -> float:
    assert isinstance(found, Reading)
    assert found.basis == "assumed"
    return found.value


def reason(found: object) -> str:
    assert isinstance(found, Missing)
    return found.reason


def test_everything_by_hand() -> None:
    found = plan_results(STEP_FLOPS, STATED, PETA)
    assert value(found[STEP]) == pytest.approx(4e15 / (0.5 * 8 * 1e15))
    assert value(found[TOKENS_PER_S]) == pytest.approx(100_000)
    assert value(found[DURATION]) == pytest.approx(10)  # 36000 s
    assert value(found[ENERGY]) == pytest.approx(8 * 0.5 * 10)
    assert value(found[CARBON]) == pytest.approx(40 * 200 * 1.25)
    assert value(found[COST]) == pytest.approx(8 * 10 * 2)
    assert [found[key].unit for key in (ENERGY, CARBON, COST)] == ["kWh", "g", "EUR"]  # type: ignore[union-attr]


def test_each_figure_names_what_it_rests_on() -> None:
    found = plan_results(STEP_FLOPS, STATED, PETA)
    notes = {key: one.note for key, one in found.items() if isinstance(one, Reading)}
    assert "MFU 0.5 (as given)" in notes[STEP]
    assert "its datasheet" in notes[STEP]
    assert "500 W as given" in notes[ENERGY]
    assert "200 g/kWh (the operator)" in notes[CARBON]
    assert "PUE 1.25 (source not stated)" in notes[CARBON]


def test_power_may_be_a_stated_share_of_the_tdp() -> None:
    plan = TrainingPlan(tokens=3.6e9, mfu=0.5, devices=8, power_frac=0.8, tdp_w=700)
    found = plan_results(STEP_FLOPS, plan, PETA)
    assert value(found[ENERGY]) == pytest.approx(8 * 0.56 * 10)
    unknown = plan_results(STEP_FLOPS, TrainingPlan(tokens=1, mfu=0.5, power_frac=0.8), PETA)
    assert "TDP is not known" in reason(unknown[ENERGY])


def test_what_was_not_stated_has_no_default() -> None:
    found = plan_results(STEP_FLOPS, TrainingPlan(), PETA)
    assert {reason(found[key]) for key in (STEP, DURATION, ENERGY, CARBON, COST)} == {
        reason(found[STEP])
    }
    assert "--mfu" in reason(found[STEP])
    timed = plan_results(STEP_FLOPS, TrainingPlan(mfu=0.4), PETA)
    assert value(timed[STEP]) == pytest.approx(10)
    assert "--tokens" in reason(timed[DURATION])
    long = plan_results(STEP_FLOPS, TrainingPlan(mfu=0.4, tokens=1e9), PETA)
    assert "--watts" in reason(long[ENERGY])
    assert "--watts" in reason(long[CARBON])
    assert "--price-per-hour" in reason(long[COST])
    powered = plan_results(STEP_FLOPS, TrainingPlan(mfu=0.4, tokens=1e9, watts=300), PETA)
    assert "--grid-g-per-kwh" in reason(powered[CARBON])


def test_without_a_peak_there_is_no_time() -> None:
    found = plan_results(STEP_FLOPS, STATED, Missing("unknown peak: pass --peak"))
    assert set(map(reason, found.values())) == {"unknown peak: pass --peak"}


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        ({"mfu": 40}, "as in 0.4"),
        ({"mfu": 0}, "got 0"),
        ({"watts": 300, "power_frac": 0.5}, "not as both"),
        ({"mfu": 1.2, "mfu_source": "of the run before"}, "got 1.2, of the run before"),
        ({"tokens": -1}, "--tokens is .*: above 0 and at most 1e.18; got -1"),
        ({"price_per_hour": float("nan")}, "--price-per-hour is .*: above 0 .*; got nan"),
        ({"power_frac": 80}, "share of its TDP, as in 0.8: above 0 and at most 1.5; got 80"),
        ({"pue": 0.9}, "--pue is .*: 1 or more"),
        ({"grid_g_per_kwh": float("inf")}, "--grid-g-per-kwh is .*; got inf"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(stated: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TrainingPlan(**stated)  # type: ignore[arg-type]


def test_the_verdict_says_what_is_needed_and_what_is_there() -> None:
    memory = step_memory(read_graph(SMALL), Batch.of(4, 128))
    needs = memory.peak.total_bytes
    roomy = Room(2 * needs, "its datasheet")
    assert verdict(needs, roomy).startswith("fits with ")
    assert "90 % of" in verdict(needs, roomy)
    tight = Room(needs, "its datasheet")
    assert verdict(needs, tight).startswith("does not fit: needs ")
    assert "unknown: no device" in verdict(needs, Missing("no device"))
    found = memory_results(memory, tight, None)
    assert value(found[PEAK]) == needs
    assert value(found[SPARE]) == pytest.approx(-0.1 * needs)
    assert "not even one" in reason(found[BATCH_MAX])


def test_kinds_of_memory_add_up_to_the_peak() -> None:
    memory = step_memory(read_graph(SMALL), Batch.of(4, 128))
    found = memory_results(memory, Missing("no device"), None)
    kinds = [key for key in found if key.startswith("estimate.memory_") and key != PEAK]
    assert sum(value(found[key]) for key in kinds if key != SPARE) == value(found[PEAK])


def test_a_usable_share_is_a_share() -> None:
    with pytest.raises(UsageError, match=r"--usable is the share .* got 1\.5"):
        Room(1e9, "its datasheet", 1.5)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_device_has_some_memory_and_not_all_there_is(value: float) -> None:
    with pytest.raises(UsageError, match=f"--memory-gib is .*; got {value:g}"):
        Room(value * 2**30, "as given")


@pytest.mark.parametrize("options", [{"grid_g_per_kwh": 0}, {"pue": 1}, {"mfu": 1}])
def test_the_ends_of_a_range_may_be_stated(options: dict[str, float]) -> None:
    plan = TrainingPlan(**options)  # type: ignore[arg-type]
    assert all(getattr(plan, name) == value for name, value in options.items())


def job(
    sequences: int = 1, *, training: TrainedParts | None = None, **setup: object
) -> TrainingJob:
    made = Setup(**setup)  # type: ignore[arg-type]
    return TrainingJob(
        read_graph(SMALL), Batch.of(sequences, 128), training or TrainedParts(), made
    )


def test_the_search_for_the_largest_batch_ends() -> None:
    found = micro_batch_max(job(), float("inf"))
    assert found == MOST_SEQUENCES
    memory = step_memory(read_graph(SMALL), Batch.of(1, 128))
    said = memory_results(memory, Room(1e12, "as given"), found, spread=4)
    assert value(said[BATCH_MAX]) == 4 * value(said[MICRO_BATCH_MAX])
    assert "or more" in str(said[BATCH_MAX].note)  # type: ignore[union-attr]


@given(room=st.floats(1e6, 1e10), data=st.integers(1, 4), parts=st.integers(1, 3))
def test_the_largest_batch_fits_and_the_next_does_not(room: float, data: int, parts: int) -> None:
    each = job(data * parts, micro_batches=parts, parallel=Parallel(data))
    found = micro_batch_max(each, room)
    if found is None:
        assert each.peak_bytes() > room
    else:
        assert each.of(found * each.spread).peak_bytes() <= room
        assert room < each.of((found + 1) * each.spread).peak_bytes()


def test_each_change_has_the_peak_that_it_leads_to() -> None:
    found = {way.name: way for way in ways(job(8), None)}
    assert found[AS_ASKED].peak_bytes == job(8).peak_bytes()
    full = job(8, training=TrainedParts(checkpointing="full"))
    assert found["--checkpointing full"].peak_bytes == full.peak_bytes()
    parts = job(8, micro_batches=8)
    assert found["--micro-batches 8"].peak_bytes == parts.peak_bytes()
    assert all(way.fits is None for way in found.values())
    assert all(way.peak_bytes <= found[AS_ASKED].peak_bytes for way in found.values())


def test_a_change_that_gains_nothing_on_a_lesser_one_is_no_way() -> None:
    """Where the peak is at the loss there are no gradients yet, and sharding them is no use."""
    llama = read_graph("hidden=4096,layers=32,ffn=11008,heads=32,vocab=32000")
    each = TrainingJob(llama, Batch.of(8, 4096), TrainedParts(), Setup(parallel=Parallel(data=8)))
    peaks = {
        stage: replace(each, setup=replace(each.setup, parallel=Parallel(8, zero=stage)))
        .peak_bytes()
        for stage in range(4)
    }  # fmt: skip
    assert peaks[0] > peaks[1] == peaks[2] > peaks[3]
    names = [way.name for way in ways(each, None)]
    assert [name for name in names if "zero" in name] == ["--zero 1", "--zero 3"]
    tight = ways(each, 1e6)  # which nothing fits: each line of several has to gain something
    several = [way.peak_bytes for way in tight if way.name.count("--") > 1]
    assert len(several) >= 2
    assert several == sorted(set(several), reverse=True)


def test_where_no_single_change_is_enough_several_are_tried_and_more_devices() -> None:
    each = job(8, parallel=Parallel(data=8))
    asked = each.peak_bytes()
    enough = ways(each, 0.9 * asked)
    assert any(way.fits for way in enough)
    assert not any("--num-devices" in way.name for way in enough)
    alone = min(way.peak_bytes for way in ways(each, None))
    tight = ways(each, 0.9 * alone)
    together = [way for way in tight if way.fits]
    assert together
    assert all(way.name.count("--") > 1 for way in together)
    assert together[-1].name == "--num-devices 16 --zero 3 --checkpointing full --batch-size 16"
    assert together[0].name.startswith("--zero 3 --checkpointing full")


def test_a_cache_by_hand() -> None:
    """Llama 3.1 8B: 32 layers, 8 heads of 128 for keys and as many for values, 2 B each."""
    graph = read_graph("hidden=4096,layers=32,ffn=14336,heads=32,kv_heads=8,vocab=128256")
    each = serving(graph, Batch.of(4, 8192), plain("bf16", source="the test"), Parallel())
    assert each.cache_bytes == 32 * 2 * 8 * 128 * 2 * 8192
    assert each.weights_bytes == 2 * 8_030_261_248
    found = serving_results(each, Room(80e9, "its datasheet"))
    assert value(found[PEAK]) == each.weights_bytes + 4 * each.cache_bytes
    assert value(found[SEQUENCES_MAX]) == (72e9 - each.weights_bytes) // each.cache_bytes
    split = serving(graph, Batch.of(4, 8192), plain("bf16", source="the test"), Parallel(tensor=16))
    assert split.cache_bytes == each.cache_bytes / 8  # no further than there are heads
    assert "weights alone" in reason(
        serving_results(each, Room(16e9, "its datasheet"))[SEQUENCES_MAX]
    )


def test_copies_of_a_model_share_the_sequences() -> None:
    graph = read_graph(SMALL)
    each = serving(graph, Batch.of(4, 128), plain("bf16", source="the test"), Parallel(data=2))
    assert each.sequences == 2
    room = each.weights_bytes + 10 * each.cache_bytes
    assert each.sequences_max(room) == 20
    with pytest.raises(UsageError, match="must be a multiple of the 3 model copies"):
        serving(graph, Batch.of(4, 128), plain("bf16", source="the test"), Parallel(data=3))


def test_what_the_program_decides_is_among_the_changes() -> None:
    llama = read_graph("hidden=2048,layers=22,ffn=5632,heads=32,kv_heads=4,vocab=32000")
    setup = Setup(optimizer="adamw", output="until-next")
    found = {
        way.name: way
        for way in ways(TrainingJob(llama, Batch.of(1, 256), TrainedParts(), setup), None)
    }
    params, logits = 1_100_048_384, 256 * 32000 * 2
    step = 10 * params + logits  # weights, gradients, two moments, a temporary; and the logits
    assert found["as asked"].peak_bytes == step
    # Without the temporary the peak is where the last gradient is made, that of the embedding.
    assert found["--optimizer adamw-fused"].peak_bytes == step - 2 * params + 256 * 2048 * 2
    assert "--output freed" not in found  # 16 MB of 11 GB are not worth a line
    held = TrainingJob(llama, Batch.of(8, 2048), TrainedParts(), setup)
    freed = {way.name: way.peak_bytes for way in ways(held, None)}
    assert freed["as asked"] - freed["--output freed"] == 8 * 2048 * 32000 * 2

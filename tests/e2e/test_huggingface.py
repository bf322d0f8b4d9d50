"""The callback in real Trainers of transformers and TRL: tokens by hand, the training untouched."""

from __future__ import annotations

import json
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from ergmeter.records import PHASES
from ergmeter.runlog.reader import Run
from tests.e2e.conftest import Program, needs, quick, reported, script, warmed

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.frameworks

needs("transformers")

# As ./dev makes it: an older transformers in a folder of its own, with what it needs beside it.
OLDER = Path(__file__).parents[2] / ".older" / "transformers4"
LLAMA = "transformers.models.llama.modeling_llama"
TRAINER = ("light", "torch._dynamo", LLAMA, "transformers.trainer", "transformers.trainer_callback")
# Text n of the scripts has so many tokens; batches take them in this order.
LENGTHS = [5 + 7 * number % 11 for number in range(80)]


class Trained(NamedTuple):
    """What one of the scripts left behind."""

    path: Path
    told: dict[str, Any]
    out: bytes
    err: bytes

    def run(self, scenario: str) -> Run:
        return Run.open(self.path / "runs" / scenario)

    def steps(self, scenario: str, *columns: str) -> list[list[Any]]:
        """These columns of the training steps, in order; None for what is not known."""
        found = self.run(scenario).steps()
        train = found["phase"] == PHASES.index("train")
        return [
            [None if math.isnan(v) else v for v in found[name][train].tolist()] for name in columns
        ]

    def readings(self, scenario: str) -> dict[str, Any]:
        found: dict[str, Any] = reported(self.path / "runs" / scenario)["readings"]
        return found


def trained(
    programs: Sequence[tuple[str, str, int]],
    loads: tuple[str, ...],
    factory: pytest.TempPathFactory,
    **more: str,
) -> list[Trained]:
    """Run scripts, each with a word and by a number of ranks, in folders of their own."""
    made = [
        Program(script(name, how)[1:], factory.mktemp(how), loads, ranks)
        for name, how, ranks in programs
    ]
    found = []
    for one, done in zip(made, warmed(*made, **more), strict=True):
        told = one.cwd / "told.json"  # the callback's ends with an error that nobody handles
        assert told.exists() or one.ranks, done.stderr
        said = {} if one.ranks else json.loads(told.read_text())
        found.append(Trained(one.cwd, said, done.stdout.encode(), done.stderr.encode()))
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    """The same trainings with the callback and without it, and one of two ranks."""
    programs = [("hf_callback", "with", 0), ("hf_callback", "without", 0), ("hf_ranks", "two", 2)]
    return trained(programs, TRAINER, tmp_path_factory)


@pytest.fixture(scope="module")
def pair(three: list[Trained]) -> list[Trained]:
    return three[:2]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    if not OLDER.is_dir():
        pytest.skip("no transformers 4.57 in .older/transformers4; `./dev test` puts it there")
    programs = [("hf_callback", "with", 0)]
    (one,) = trained(programs, TRAINER, tmp_path_factory, PYTHONPATH=str(OLDER))
    return one


@pytest.fixture(params=["installed", "4.57"])
def measured(request: pytest.FixtureRequest) -> Trained:
    name = "pair" if request.param == "installed" else "older"
    found = request.getfixturevalue(name)
    one: Trained = found[0] if name == "pair" else found
    return one


@pytest.fixture(scope="module")
def trl_pair(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    needs("trl")
    loads = ("torch._dynamo", LLAMA, "peft", "trl.trainer.dpo_trainer", "trl.trainer.sft_trainer")
    programs = [("hf_trl", "with", 0), ("hf_trl", "without", 0)]
    return trained(programs, loads, tmp_path_factory, **quick("bitsandbytes", "scipy", "sklearn"))


_TIMES = re.compile(r"('\w+(?:_runtime|_per_second)': )'[^']*'")


def untimed(printed: bytes) -> list[str]:
    """What was printed, line by line, but for progress bars and how long anything took."""
    lines = re.split(r"[\r\n]+", printed.decode().replace("\x1b[A", ""))
    return [_TIMES.sub(r"\1TIME", line) for line in lines if "%|" not in line and line.strip()]


def by_hand(first: int, batches: int, *, accumulated: int = 1) -> list[list[float]]:
    """Of each step: positions, tokens, those with loss, texts. Batches hold four texts each."""
    rows = []
    for start in range(first, first + batches, accumulated):
        fours = [LENGTHS[4 * batch : 4 * batch + 4] for batch in range(start, start + accumulated)]
        rows.append(
            (
                sum(4 * max(four) for four in fours),
                sum(sum(four) for four in fours),
                # A third is prompt; the first token would bear none either.
                sum(length - length // 3 for four in fours for length in four),
                4 * accumulated,
            )
        )
    return [list(column) for column in zip(*rows, strict=True)]


TOKENS = ("tokens_computed", "tokens_real", "tokens_loss", "samples")


def test_padded_batches_of_four_micro_batches_are_counted_and_nothing_else(
    measured: Trained,
) -> None:
    assert measured.steps("everything", *TOKENS) == by_hand(0, 20, accumulated=4)
    assert measured.steps("everything", "micro_steps") == [[4] * 5]
    real = measured.steps("everything", "tokens_real")[0]
    assert sum(real) == measured.told["everything"]["seen"]  # HF's own count, of "non_padding"
    assert sum(LENGTHS) == sum(real) == 795


def test_losses_rates_and_norms_are_kept_with_the_steps_they_were_logged_at(
    measured: Trained,
) -> None:
    told = measured.told["everything"]
    assert measured.steps("everything", "loss", "grad_norm", "learning_rate") == [
        told["losses"],
        told["norms"],
        told["rates"],
    ]
    assert len(told["losses"]) == 5


def test_evaluation_checkpoints_and_waiting_for_data_lie_between_the_steps(
    measured: Trained,
) -> None:
    told = measured.told["everything"]
    steps = measured.run("everything").steps()
    spans = {
        phase: [
            (int(a), int(b))
            for a, b, kind in zip(steps["start_ns"], steps["end_ns"], steps["phase"], strict=True)
            if PHASES[int(kind)] == phase
        ]
        for phase in ("train", "eval", "checkpoint", "data")
    }
    assert len(spans["eval"]) == told["evaluations"] >= 2  # of two sets each
    assert len(spans["checkpoint"]) == told["checkpoints"] >= 2  # safetensors and nothing beside
    assert len(spans["data"]) == 5  # for each step, four batches at once
    ordered = sorted(span for found in spans.values() for span in found)
    assert all(before[1] <= after[0] for before, after in pairwise(ordered))
    not_trained = steps["phase"] != PHASES.index("train")
    assert np.isnan(steps["tokens_computed"][not_trained]).all()
    readings = measured.readings("everything")
    for phase in ("eval", "checkpoint", "data"):
        spent_s = sum(end - start for start, end in spans[phase]) / 1e9
        assert readings[f"time.{phase}_s"]["value"] == pytest.approx(spent_s, rel=1e-6)
        assert spent_s > 0


def test_a_resumed_training_goes_on_counting_its_steps(measured: Trained) -> None:
    assert measured.steps("stopped", "index", *TOKENS) == [[0, 1, 2], *by_hand(0, 3)]
    assert measured.steps("resumed", "index", *TOKENS) == [[3, 4, 5, 6], *by_hand(3, 4)]
    assert measured.steps("resumed", "loss") == [measured.told["resumed"]["losses"][3:]]


def test_each_training_of_a_trainer_is_a_run_and_two_callbacks_count_once(
    measured: Trained,
) -> None:
    names = ["twice", "twice-2"]
    for name in names:
        assert measured.steps(name, "index", *TOKENS) == [[0, 1, 2], *by_hand(0, 3)]
        assert measured.run(name).status == "finished"
    for other in ("beside", "unasked"):
        assert not (measured.path / "runs" / other).exists()
    ids = {tuple(measured.run(name).trainings) for name in names}
    assert len(ids) == 2


def test_a_loss_that_is_a_mean_stays_where_it_was_logged_and_says_so(measured: Trained) -> None:
    (logged,) = measured.told["twice"]["losses"]  # of steps 0 and 1; nothing was logged of step 2
    assert measured.steps("twice", "loss") == [[None, logged, None]]
    assert "loss_is_mean" in {mark.name for mark in measured.run("twice").marks}
    assert "loss_is_mean" not in {mark.name for mark in measured.run("everything").marks}


def test_a_compiled_model_is_counted_as_another(measured: Trained) -> None:
    assert measured.steps("compiled", "index", *TOKENS) == [[0, 1, 2], *by_hand(0, 3)]


def test_a_meter_around_the_training_is_used_and_left_open(measured: Trained) -> None:
    assert measured.steps("around", "index", *TOKENS) == [[0, 1, 2], *by_hand(0, 3)]
    assert "afterwards" in {mark.name for mark in measured.run("around").marks}


def test_a_run_says_what_its_training_failed_of(measured: Trained) -> None:
    failed, unhandled = measured.run("failed"), measured.run("unhandled")
    assert failed.status == "failed (ValueError: the third batch is bad)"
    assert unhandled.status == "failed (RuntimeError: the optimizer is out of memory)"
    for scenario in ("failed", "unhandled"):  # the steps before it are there
        assert measured.steps(scenario, *TOKENS) == by_hand(0, 2)


def test_the_trainer_is_as_it_was_afterwards(measured: Trained) -> None:
    assert {name: told["own_methods"] for name, told in measured.told.items() if told} == {
        name: [] for name in measured.told
    }


def test_model_flops_utilization_is_that_of_the_real_tokens(measured: Trained) -> None:
    # 2 layers of 4 x 32 x 32 and 3 x 32 x 64, a head of 32 x 256; three passes of 2 FLOPs each.
    products = 6 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 256)
    real = LENGTHS[:80]  # each row by its own length, whatever it was padded to
    length = round(sum(one**2 for one in real) / sum(real))
    attention = 6 * 2 * 2 * 32 * (length + 1) / 2  # two products in a layer, half of them masked
    readings = measured.readings("everything")
    assert readings["compute.model_flops_per_token"]["value"] == pytest.approx(products + attention)
    assert readings["utilization.mfu_frac"]["value"] == pytest.approx(
        (products + attention) * readings["throughput.real_tokens_per_s"]["value"] / 1e12
    )
    # The padding goes through every layer too.
    widths = [max(LENGTHS[4 * batch : 4 * batch + 4]) for batch in range(20)]
    extra = products * (4 * sum(widths) / sum(real) - 1)
    assert readings["utilization.hfu_frac"]["value"] == pytest.approx(
        readings["utilization.mfu_frac"]["value"] * (1 + extra / (products + attention)), rel=0.01
    )


def test_losses_are_the_same_to_the_last_bit_and_nothing_more_is_printed(
    pair: list[Trained],
) -> None:
    within, without = pair
    assert within.told == without.told
    assert sum(len(told["losses"]) for told in within.told.values()) > 20
    for printed in ("out", "err"):
        lines = [untimed(getattr(one, printed)) for one in pair]
        assert lines[0] == lines[1]
        assert len(lines[0]) > 10
    assert not (without.path / "runs").exists()


def test_adapters_of_trl_are_counted_with_their_padding_and_parameters(
    trl_pair: list[Trained],
) -> None:
    one = trl_pair[0]
    computed, real, loss, samples = one.steps("lora", *TOKENS)
    lengths = LENGTHS[:24]
    assert [sum(real[: n + 1]) for n in range(3)] == one.told["lora"]["tokens"]  # TRL's own count
    assert sum(real) == sum(lengths)
    assert sum(loss) == sum(lengths) - 24  # nothing predicts the first token of a text
    assert samples == [8, 8, 8]
    assert all(c > r for c, r in zip(computed, real, strict=True))
    run = one.run("lora")
    trained_alone, whole = one.told["lora"]["parameters"]
    (header,) = [w.header["training"] for w in run.writers]
    assert trained_alone == 2 * 2 * 4 * (32 + 32)  # 2 layers, q and v, rank 4
    assert header["parameters"] == run.settings["parameters"] == whole
    assert header["parameters_trained"] == trained_alone
    assert one.readings("lora")["utilization.mfu_frac"]["value"] > 0
    full, adapted = (one.run(name).flops[0] for name in ("free", "lora"))
    assert full.tokens_per_step is not None
    assert adapted.tokens_per_step is not None
    # Frozen weights have no gradients of their own: two passes of three, and the adapters'.
    ratio = (adapted.model_per_step / adapted.tokens_per_step) / (
        full.model_per_step / full.tokens_per_step
    )
    assert 0.6 < ratio < 0.75


@pytest.mark.parametrize("scenario", ["free", "packed"])
def test_packed_texts_of_trl_are_all_real_and_each_is_a_sample(
    trl_pair: list[Trained], scenario: str
) -> None:
    one = trl_pair[0]
    computed, real, loss, samples = one.steps(scenario, *TOKENS)
    assert computed == real
    running = [sum(real[: n + 1]) for n in range(len(real))]
    assert running == one.told[scenario]["tokens"]
    assert sum(real) == sum(LENGTHS[:24])
    assert sum(samples) == 24
    assert sum(loss) == sum(LENGTHS[:24]) - 24


def test_packing_costs_the_attention_of_each_text_and_not_of_the_row(
    trl_pair: list[Trained],
) -> None:
    lengths = LENGTHS[:24]
    length = round(sum(n**2 for n in lengths) / sum(lengths))
    assert trl_pair[0].run("packed").flops[0].tokens_per_step == length


def test_preferences_count_both_answers_and_bear_loss_in_them(trl_pair: list[Trained]) -> None:
    one = trl_pair[0]
    computed, real, loss, samples = one.steps("dpo", *TOKENS)
    answers = [n + 1 for n in LENGTHS[:12]]  # with their end; the other answer has 4 + 1
    assert sum(real) == sum(3 + n + 3 + 5 for n in answers)
    assert sum(loss) == sum(n + 5 for n in answers)
    assert samples == [8, 8, 8]
    assert all(c % 8 == 0 and c > r for c, r in zip(computed, real, strict=True))
    assert one.readings("dpo")["utilization.mfu_frac"]["value"] > 0


def test_losses_of_trl_are_the_same_to_the_last_bit(trl_pair: list[Trained]) -> None:
    assert trl_pair[0].told == trl_pair[1].told
    assert all(told["losses"] for told in trl_pair[0].told.values())


def test_two_ranks_count_what_each_was_given_into_one_run(three: list[Trained]) -> None:
    one = three[2]
    (path,) = (one.path / "runs").iterdir()
    run = Run.open(path)
    assert run.status == "finished"
    assert len(run.trainings) == 1
    steps = run.steps()
    for rank in (0, 1):
        own = json.loads((one.path / f"{rank}.json").read_text())
        of_rank = (steps["rank"] == rank) & (steps["phase"] == PHASES.index("train"))
        assert of_rank.sum() == own["steps"] == 6
        for name in ("computed", "real"):
            assert steps[f"tokens_{name}"][of_rank].sum() == own[name]
        assert steps["samples"][of_rank].sum() == own["samples"] == 22
    readings = one.readings(path.name)
    assert readings["tokens.total"]["value"] == own["seen"] == sum(LENGTHS[:44]) == 440
    assert readings["steps.count"]["value"] == 6
    assert readings["time.checkpoint_s"]["value"] > 0

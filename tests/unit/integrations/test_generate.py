"""`model.generate` measured: its tokens by hand, its times beside a hand-timed loop."""

from __future__ import annotations

import copy
import pickle
import statistics
import time
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter import Meter, UsageError
from ergmeter.records import PHASES, Missing, Reading
from ergmeter.runlog.reader import Run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from ergmeter.integrations import generate  # noqa: E402
from ergmeter.integrations.generate import measure  # noqa: E402

PAD, EOS = 0, 1


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "pad_token_id": PAD,
            "eos_token_id": EOS,
            "bos_token_id": 2,
            **sizes,
        }
    )
    return transformers.LlamaForCausalLM(config).eval()


def prompts(*lengths: int) -> dict[str, Any]:
    """Prompts of these lengths, padded on the left to the longest."""
    longest = max(lengths)
    ids = torch.full((len(lengths), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.arange(3, 3 + length)
        mask[row, longest - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def spans(path: Path) -> dict[str, dict[str, list[float]]]:
    """The prefill and the decode rows, in order of their number."""
    columns = Run.open(path).steps()
    found = {}
    for phase in ("prefill", "decode"):
        rows = np.flatnonzero(columns["phase"] == PHASES.index(phase))
        rows = rows[np.argsort(columns["index"][rows], kind="stable")]
        found[phase] = {name: column[rows].tolist() for name, column in columns.items()}
    return found


def generated(tmp_path: Path, model: Any, *calls: dict[str, Any]) -> tuple[Meter, list[Any]]:
    with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
        given = [model.generate(**call) for call in calls]
    return meter, given


@dataclass
class StopAt:
    """Makes a row end at a step: its logits for the end of sequence win there and then."""

    prompt: int
    ends: dict[int, int]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        scores[:, EOS] = -1e9
        for row, end in self.ends.items():
            if input_ids.shape[1] - self.prompt == end - 1:
                scores[row, EOS] = 1e9
        return scores


def test_a_prompts_tokens_are_those_of_its_attention_mask(tmp_path: Path) -> None:
    meter, _ = generated(tmp_path, llama(), {**prompts(7, 3, 5), "max_new_tokens": 4})
    prefill = spans(meter.path)["prefill"]
    assert prefill["tokens_real"] == [7, 3, 5]
    assert prefill["tokens_computed"] == [7, 7, 7]


def test_a_sequence_counts_to_its_end_inclusive_and_ends_at_that_tokens_time(
    tmp_path: Path,
) -> None:
    call = {**prompts(4, 4, 4), "max_new_tokens": 9}
    call["logits_processor"] = [StopAt(4, {0: 3, 1: 9, 2: 6})]
    meter, (given,) = generated(tmp_path, llama(), call)
    assert given.shape == (3, 4 + 9)
    decode = spans(meter.path)["decode"]
    assert decode["tokens_real"] == [3, 9, 6]
    assert decode["tokens_computed"] == [9, 9, 9]
    assert decode["micro_steps"] == [3, 9, 6]
    lasted = [e - s for s, e in zip(decode["start_ns"], decode["end_ns"], strict=True)]
    assert lasted[0] < lasted[2] < lasted[1]


def test_pad_that_is_also_the_end_of_sequence_is_not_counted_again(tmp_path: Path) -> None:
    call = {**prompts(4, 4), "max_new_tokens": 6, "pad_token_id": EOS}
    call["logits_processor"] = [StopAt(4, {0: 2})]
    meter, (given,) = generated(tmp_path, llama(), call)
    assert given[0, 4:].tolist()[1:] == [EOS] * 5
    assert spans(meter.path)["decode"]["tokens_real"] == [2, 6]


def test_several_returned_sequences_are_several_requests_of_the_same_prompt(tmp_path: Path) -> None:
    call = {**prompts(5, 2), "max_new_tokens": 3, "do_sample": True, "num_return_sequences": 2}
    call["logits_processor"] = [StopAt(5, {})]
    meter, (given,) = generated(tmp_path, llama(), call)
    assert len(given) == 4
    assert spans(meter.path)["prefill"]["tokens_real"] == [5, 5, 2, 2]
    assert spans(meter.path)["decode"]["tokens_real"] == [3, 3, 3, 3]


def test_embeddings_have_a_length_too(tmp_path: Path) -> None:
    model = llama()
    embedded = model.get_input_embeddings()(torch.arange(3, 9)[None]).detach()
    call = {"inputs_embeds": embedded, "max_new_tokens": 4}
    call["logits_processor"] = [StopAt(0, {})]
    meter, (given,) = generated(tmp_path, model, call)
    assert given.shape == (1, 4)
    assert spans(meter.path)["prefill"]["tokens_computed"] == [6]
    assert spans(meter.path)["decode"]["tokens_real"] == [4]


def test_an_encoder_decoder_counts_its_encoders_prompt_and_its_decoders_tokens(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
        decoder_start_token_id=PAD, pad_token_id=PAD, eos_token_id=EOS,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    call = {**prompts(6, 4), "max_new_tokens": 5, "logits_processor": [StopAt(1, {1: 3})]}
    meter, _ = generated(tmp_path, model, call)
    assert spans(meter.path)["prefill"]["tokens_real"] == [6, 4]
    assert spans(meter.path)["decode"]["tokens_real"] == [5, 3]


@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}]
)
def test_what_is_generated_is_the_same_with_and_without_it(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    model = llama()
    call = {**prompts(6, 3), "max_new_tokens": 12, **how}

    def seeded() -> Any:
        torch.manual_seed(7)
        return model.generate(**call)

    bare = seeded()
    with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
        assert torch.equal(seeded(), bare)
    assert "generate" not in vars(model)
    assert torch.equal(seeded(), bare)


def test_the_callers_own_stopping_criteria_still_stop(tmp_path: Path) -> None:
    def at_nine(input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= 9)

    call = {**prompts(5), "max_new_tokens": 20, "stopping_criteria": [at_nine]}
    call["logits_processor"] = [StopAt(5, {})]
    meter, (given,) = generated(tmp_path, llama(), call)
    assert given.shape == (1, 9)
    assert spans(meter.path)["decode"]["tokens_real"] == [4]


def test_beams_are_left_out_and_the_run_says_so(tmp_path: Path) -> None:
    calls = [{**prompts(5), "max_new_tokens": 4, "num_beams": 2}] * 2
    meter, _ = generated(tmp_path, llama(), *calls)
    marks = [mark for mark in Run.open(meter.path).marks if mark.name == "generate_not_measured"]
    assert len(marks) == 1
    assert "num_beams=2" in marks[0].detail
    found = meter.summary().readings["latency.ttft_median_s"]
    assert isinstance(found, Missing)


def test_a_closed_meter_does_not_cost_the_answer(tmp_path: Path) -> None:
    model = llama()
    meter = Meter(tmp_path / "run", probes=[])
    with meter:
        handle = measure(model, meter)
    with pytest.warns(UserWarning, match="not measur"):
        assert model.generate(**prompts(5), max_new_tokens=4).shape[0] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(**prompts(5), max_new_tokens=4)
    handle.remove()


def test_a_model_is_measured_once_and_must_be_able_to_generate(tmp_path: Path) -> None:
    model = llama()
    meter = Meter(tmp_path / "run", probes=[])
    measure(model, meter)
    with pytest.raises(UsageError, match="already"):
        measure(model, meter)
    with pytest.raises(UsageError, match="Linear has no generate"):
        measure(torch.nn.Linear(2, 2), meter)


class Clock:
    """The hand's clock: a streamer that is handed the prompt, and a processor of logits that is
    asked before each token. Ours is read after each of their stamps and before the next, whoever
    has to wait for a core."""

    def __init__(self) -> None:
        self.called_s = time.perf_counter()
        self.prompted_s = self.over_s = 0.0
        self.tokens_s: list[float] = []

    def put(self, _tokens: Any) -> None:
        self.prompted_s = self.prompted_s or time.perf_counter()

    def end(self) -> None:
        """generate says when it is over; nobody asks."""

    def __call__(self, _ids: Any, scores: Any) -> Any:
        self.tokens_s.append(time.perf_counter())
        return scores


def test_ttft_tpot_and_throughput_agree_with_a_hand_timed_loop(tmp_path: Path) -> None:
    """By hand: when each token is asked for, in the very same calls, by another clock."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = llama(hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    ids = torch.arange(3, 61).repeat(2)[None]
    tokens, rounds = 16, 15
    call = {
        "attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None,
        "max_new_tokens": tokens,
    }  # fmt: skip
    hand: list[Clock] = []
    try:
        with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
            for number in range(rounds + 2):
                if number == 2:
                    meter.mark("warmup_end")
                hand.append(Clock())
                model.generate(ids, streamer=hand[-1], logits_processor=[hand[-1]], **call)
                hand[-1].over_s = time.perf_counter()
    finally:
        torch.set_num_threads(threads)
    counted = hand[2:]
    gaps = [later - earlier for one in counted for earlier, later in pairwise(one.tokens_s)]
    rows = spans(meter.path)
    starts, firsts = rows["prefill"]["start_ns"][2:], rows["prefill"]["end_ns"][2:]
    ours = [
        ((first - start) / 1e9, (last - start) / 1e9)
        for start, first, last in zip(starts, firsts, rows["decode"]["end_ns"][2:], strict=True)
    ]

    def tpot(call: tuple[float, float]) -> float:
        return (call[1] - call[0]) / (tokens - 1)

    for (ttft_s, whole_s), one in zip(ours, counted, strict=True):
        first_s, second_s, *_, last_s = one.tokens_s
        assert first_s - one.prompted_s <= ttft_s <= second_s - one.called_s
        assert last_s - one.prompted_s <= whole_s <= one.over_s - one.called_s
        assert last_s - second_s <= whole_s - ttft_s <= one.over_s - first_s
    readings = meter.summary().readings

    def value(key: str) -> float:
        found = readings[key]
        assert isinstance(found, Reading), found
        return found.value

    assert value("latency.ttft_median_s") == pytest.approx(statistics.median(c[0] for c in ours))
    assert value("latency.e2e_median_s") == pytest.approx(statistics.median(c[1] for c in ours))
    assert value("latency.tpot_median_s") == pytest.approx(statistics.median(map(tpot, ours)))
    between_s = statistics.median(gaps)  # of 225: twice, or the half, is another thing
    assert between_s / 2 < value("latency.itl_median_s") < 2 * between_s
    decoding_s = sum(whole - first for first, whole in ours)
    assert value("throughput.generated_tokens_per_s") == pytest.approx(
        tokens * rounds / decoding_s, rel=1e-6
    )
    least_s = counted[-1].tokens_s[-1] - counted[0].prompted_s
    most_s = counted[-1].over_s - counted[0].called_s
    per_s = value("throughput.output_tokens_per_s")
    assert tokens * rounds / most_s <= per_s <= tokens * rounds / least_s
    assert value("throughput.tokens_per_s") == pytest.approx(
        (tokens + ids.shape[1]) / tokens * per_s
    )
    found = readings["latency.ttft_median_s"]
    assert isinstance(found, Reading)
    assert "from the call of generate; host clock" in found.note


def test_a_copy_and_a_pickle_of_a_measured_model_are_models_of_their_own(tmp_path: Path) -> None:
    model = llama()
    asked = {**prompts(4), "max_new_tokens": 5, "do_sample": False}
    with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for one in copies:
            with torch.no_grad():
                one.lm_head.weight.neg_()
        own = model.generate(**asked).tolist()
        others = [one.generate(**asked).tolist() for one in copies]
    assert others[0] == others[1] != own
    assert len(spans(meter.path)["decode"]["index"]) == 1  # and theirs are not measured


def test_what_is_passed_by_its_place_arrives(tmp_path: Path) -> None:
    class Never:
        def __call__(self, input_ids: Any, _scores: Any, **_more: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 6)

    model = llama()
    config = transformers.GenerationConfig(max_new_tokens=9, pad_token_id=PAD)
    criteria = transformers.StoppingCriteriaList([Never()])
    ids = prompts(4)["input_ids"]
    plain = model.generate(ids, config, None, criteria).tolist()
    with Meter(tmp_path / "run", probes=[]) as meter, measure(model, meter):
        measured = model.generate(ids, config, None, criteria).tolist()
    assert measured == plain
    assert len(measured[0]) == 6
    assert spans(meter.path)["decode"]["tokens_real"] == [2]


def test_our_own_failure_costs_nobody_what_was_generated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_given: Any) -> Any:
        raise RuntimeError("broken")

    model = llama()
    asked = {**prompts(4), "max_new_tokens": 3}
    plain = model.generate(**asked).tolist()
    monkeypatch.setattr(generate, "_lengths", broken)
    meter, given = generated(tmp_path, model, asked)
    assert given[0].tolist() == plain
    said = {one.name: one.detail for one in Run.open(meter.path).marks}
    assert said["generate_not_measured"] == "RuntimeError: broken"

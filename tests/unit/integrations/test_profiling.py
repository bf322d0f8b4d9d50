"""A profile neither ends a training nor takes another's events, and what it costs is told."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch.profiler import ProfilerActivity, profile, schedule  # noqa: E402

from ergmeter.errors import UsageError  # noqa: E402
from ergmeter.importers import torch_trace  # noqa: E402
from ergmeter.integrations.profiling import Profile  # noqa: E402
from ergmeter.integrations.training import Training  # noqa: E402
from ergmeter.meter import Meter  # noqa: E402
from ergmeter.metrics.summarize import summarize  # noqa: E402
from ergmeter.records import Mark, Step  # noqa: E402
from ergmeter.runlog.reader import Run  # noqa: E402
from tests.runs import reading, reason, run_of  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

IDLE = "profile.idle_frac"


def is_on() -> bool:
    return bool(torch.autograd._profiler_enabled())


def steps(training: Training, count: int) -> None:
    layer = torch.nn.Linear(4, 4)
    for _ in range(count):
        training.step_begin()
        layer(torch.ones(2, 4)).sum().backward()
        training.step_end()


def profiled_loop(path: Path, count: int = 10) -> int:
    """The steps that a loop gets to make, two of them profiled after three."""
    made = 0
    with Meter(out=path, probes=()) as meter, Profile(meter, steps=2, after=2) as one:
        for _ in range(count):
            with meter.step(tokens=1):
                torch.ones(8, 8) @ torch.ones(8, 8)
            one.step()
            made += 1
    assert not is_on()
    return made


# -- its training fails ---------------------------------------------------------------------------


def test_a_training_that_fails_takes_torchs_profiler_off(tmp_path: Path) -> None:
    training = Training(out=tmp_path / "run", probes=(), profile_steps=5)
    training.begin()
    steps(training, 13)
    assert is_on()
    training.fail(ValueError("ours"))
    assert not is_on()
    steps(training, 5)
    training.end()
    assert reason(Run.open(tmp_path / "run"), IDLE) == "ValueError: ours"


def test_one_that_fails_on_another_thread_does_so_at_the_next_call(tmp_path: Path) -> None:
    training = Training(out=tmp_path / "run", probes=(), profile_steps=5)
    training.begin()
    steps(training, 13)
    thread = threading.Thread(target=training.fail, args=(ValueError("ours"),))
    thread.start()
    thread.join()
    steps(training, 1)
    assert not is_on()
    training.end()


# -- the program has a profiler of its own --------------------------------------------------------


def own_events(path: Path, profile_steps: int, wait: int) -> int:
    """How many events a profiler of the program's own sees, of three steps after `wait`."""
    training = Training(out=path, probes=(), profile_steps=profile_steps)
    training.begin()
    seen: list[int] = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=wait, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda one: seen.append(len(one.events())),
    ) as own:
        for _ in range(25):
            steps(training, 1)
            own.step()
    training.end()
    return sum(seen)


@pytest.mark.parametrize("wait", [7, 9, 10, 11])  # it records, warms up and waits as ours begins
def test_a_profiler_of_the_programs_own_sees_what_it_sees_without_ours(
    tmp_path: Path, wait: int
) -> None:
    alone = own_events(tmp_path / "alone", 0, wait)
    assert alone > 50
    assert own_events(tmp_path / "run", 2, wait) == alone
    assert "a torch profiler of its own" in reason(Run.open(tmp_path / "run"), IDLE)


def test_one_that_was_closed_before_is_in_nobodys_way(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        torch.ones(2)
    profiled_loop(tmp_path / "run")
    assert reading(Run.open(tmp_path / "run"), IDLE).value < 1


# -- something goes wrong -------------------------------------------------------------------------


def test_a_folder_that_cannot_be_made_ends_the_profile_and_not_the_training(tmp_path: Path) -> None:
    made = 0
    with Meter(out=tmp_path / "run", probes=()) as meter, Profile(meter, steps=2, after=1) as one:
        (meter.path / "profile").write_text("in the way")
        for _ in range(10):
            with meter.step(tokens=1):
                torch.ones(8, 8) @ torch.ones(8, 8)
            one.step()
            made += 1
            assert made < 5 or not is_on()
    assert made == 10
    assert "FileExistsError" in reason(Run.open(tmp_path / "run"), IDLE)


def full_disk(_self: Any, _path: str) -> None:
    raise OSError(28, "No space left on device")


def half(_self: Any, path: str) -> None:
    with open(path, "w") as out:  # noqa: PTH123
        out.write('{"traceEvents": [{"ph": "X", "na')


def nothing(_self: Any, path: str) -> None:
    """As a logger of C++ does, which tells nobody that it could not write."""


@pytest.mark.parametrize(
    ("method", "does", "said"),
    [
        ("export_chrome_trace", full_disk, "No space left"),
        ("export_chrome_trace", half, "truncated"),
        ("export_chrome_trace", nothing, "FileNotFoundError"),
        ("prepare_trace", lambda _: 1 / 0, "ZeroDivisionError"),
        ("start_trace", lambda _: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_whatever_of_torchs_profiler_fails_is_a_reason_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, does: Any, said: str
) -> None:
    monkeypatch.setattr(profile, method, does)
    assert profiled_loop(tmp_path / "run") == 10
    assert said in reason(Run.open(tmp_path / "run"), IDLE)


# -- what it costs --------------------------------------------------------------------------------


def test_the_trace_is_read_after_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_at: list[int] = []

    def events_of(text: str) -> Any:
        read_at.append(training._index)
        return torch_trace.events_of(text)

    monkeypatch.setattr("ergmeter.integrations.profiling.events_of", events_of)
    training = Training(out=tmp_path / "run", probes=(), profile_steps=2)
    training.begin()
    steps(training, 30)
    assert training.meter is not None
    training.meter.summary()
    waits = reason(Run.open(tmp_path / "run"), IDLE)
    assert "rank0.json is read when the training ends" in waits
    assert read_at == []
    training.catch_up()  # somebody asks, and waits for the answer
    training.meter.summary()
    assert reading(Run.open(tmp_path / "run"), IDLE).value < 1
    training.end()
    assert read_at == [30]
    assert [path.name for path in (tmp_path / "run" / "profile").iterdir()] == ["rank0.json.gz"]


def test_how_long_the_export_held_the_training_up_is_in_the_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = profile.export_chrome_trace

    def slow(self: Any, path: str) -> None:
        time.sleep(0.2)
        export(self, path)

    monkeypatch.setattr(profile, "export_chrome_trace", slow)
    began_s = time.monotonic()
    profiled_loop(tmp_path / "run")
    took_s = time.monotonic() - began_s
    run = Run.open(tmp_path / "run")
    (found,) = [json.loads(mark.detail) for mark in run.marks if mark.name == "profiled"]
    assert 0.2 <= found["held_s"] <= took_s
    assert "delayed training by" in reading(run, IDLE).note


def test_profiled_steps_are_found_by_the_hosts_times(tmp_path: Path) -> None:
    """The device is 3 s behind the host: by its times others would be taken for profiled."""
    found = {
        "steps": 2, "on": "gpu", "window_s": 4.0, "compute_s": 4.0, "communication_s": 0.0,
        "communication_alone_s": 0.0, "copy_s": 0.0, "copy_alone_s": 0.0, "idle_s": 0.0,
        "lasted_s": 4.0, "held_s": 0.5, "ready_s": 2.0, "trace": "profile/rank0.json.gz",
    }  # fmt: skip
    second_ns = 10**9
    rows, now_ns = [], second_ns
    for index in range(10):  # the 6th and 7th, from 6 s to 10 s, take twice as long on the host
        end_ns = now_ns + (2 if index in (5, 6) else 1) * second_ns
        late = (now_ns + 3 * second_ns, now_ns + 4 * second_ns)
        rows.append(Step(*late, index=index, host_start_ns=now_ns, host_end_ns=end_ns))
        now_ns = end_ns
    mark = Mark(10 * second_ns, "profiled", json.dumps(found))
    note = reading(run_of(tmp_path / "run", steps=rows, marks=[mark]), IDLE).note
    assert "2 steps under torch's profiler, each 2.00 times as long as the others" in note
    assert "delayed training by 500 ms between steps, by 2 s at the start" in note


def test_profiled_steps_are_warm_up_unless_one_is_declared_or_they_come_late(
    tmp_path: Path,
) -> None:
    """Steps of 1 s but for two of 3 s, and 2 s to write the trace: 10 tokens each."""
    second_ns = 10**9

    def told(name: str, first_slow: int, **declared: int) -> tuple[float, str]:
        rows, marks, now_ns = [], [], second_ns
        for index in range(20):
            end_ns = now_ns + (3 if index in (first_slow, first_slow + 1) else 1) * second_ns
            rows.append(Step(now_ns, end_ns, index=index, tokens_computed=10))
            now_ns = end_ns
            if index == first_slow + 1:
                now_ns += 2 * second_ns
                marks.append(Mark(now_ns, "profile_unread", "profile/rank0.json"))
        run = run_of(tmp_path / name, steps=rows, marks=marks, settings=declared)
        return reading(run, "throughput.tokens_per_s").value, reading(run, "time.warmup_s").note

    value, note = told("early", 3)
    assert value == pytest.approx(10)  # the 15 steps behind them, as if there had been no profile
    assert "until the profiled steps were over" in note
    everything = 200 / (18 + 6 + 2)
    assert told("late", 15)[0] == pytest.approx(everything)  # three are left
    assert "profiled steps, which are slower, are in the window" in " ".join(
        summarize(Run.open(tmp_path / "late")).notes
    )
    assert told("declared", 3, warmup_steps=0)[0] == pytest.approx(everything)


def test_steps_of_a_real_trainer_are_profiled_and_left_out(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from ergmeter.integrations.huggingface import ErgmeterCallback

    with pytest.raises(UsageError, match="profile_steps must be an integer"):
        ErgmeterCallback(tmp_path / "run", profile_steps=-1)
    callback = ErgmeterCallback(tmp_path / "run", profile_steps=3, probes=())
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    row = {"input_ids": list(range(32)), "labels": list(range(32))}
    arguments = transformers.TrainingArguments(
        str(tmp_path / "out"), max_steps=24, per_device_train_batch_size=2, report_to="none",
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    try:
        transformers.Trainer(
            transformers.LlamaForCausalLM(config), arguments, train_dataset=[row] * 48,
            callbacks=[callback],
        ).train()  # fmt: skip
    finally:  # one for a process, which the tests after this one want in a way of their own
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    run = Run.open(tmp_path / "run")
    shares = ("compute", "communication_alone", "copy_alone", "idle")
    found = [reading(run, f"profile.{name}_frac") for name in shares]
    assert sum(one.value for one in found) == pytest.approx(1)
    assert "3 steps under torch's profiler, each" in found[0].note
    # Ten, one in which the profiler warms up, and three.
    assert reading(run, "time.warmup_steps").value == 14
    assert reading(run, "steps.count").value == 10
    assert reading(run, "tokens.total").value == 10 * 2 * 32

"""Memory over time on the terminal: bars against all there is, and the phase below them."""

from __future__ import annotations

from pathlib import Path

from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Reading, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.views.render.markdown import markdown
from ergmeter.views.run.report import memory_document
from tests.runs import even_steps, printed, run_of

S = 10**9
GB = 10**9
GPU = Device("GPU-0", "gpu", "NVIDIA H200", "nvml", {"memory_total_bytes": 140 * GB})
TORCH = Device(
    "torch:h:1:cuda:0", "allocator", "torch allocator on NVIDIA H200", "allocator",
    {"uuid": "GPU-0"},
)  # fmt: skip


def shown(run: Run) -> list[str]:
    lines = printed(*memory_document(run).parts).splitlines()
    assert all(len(line) <= 80 for line in lines)
    return lines


def row(lines: list[str], label: str) -> str:
    (line,) = [one for one in lines if one.strip().startswith(label)]
    return line[17:]


def test_a_bar_is_a_share_of_all_that_the_device_has(tmp_path: Path) -> None:
    """0, 20, 40, ... 140 GB of 140 at each second; torch has half of it."""
    samples = [Sample(t * S, GPU.id, memory_bytes=20 * GB * t) for t in range(8)]
    samples += [Sample(t * S, TORCH.id, allocated_bytes=10 * GB * t) for t in range(8)]
    run = run_of(tmp_path / "run", steps=even_steps(8), samples=samples, devices=[GPU, TORCH])
    lines = shown(run)
    assert row(lines, "in use by all") == "▁▂▃▄▅▆▇█  140 GB (100 %)"
    assert row(lines, "in tensors") == "▁▁▂▃▃▃▄▅  70 GB (50 %)"  # by the size of the GPU beneath


def test_markdown_has_the_same_lines_verbatim(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, memory_bytes=20 * GB * t) for t in range(8)]
    run = run_of(tmp_path / "run", steps=even_steps(8), samples=samples, devices=[GPU])
    lines = "\n".join(shown(run))
    assert markdown(memory_document(run)).endswith(f"```text\n{lines}\n```\n")


def test_the_most_in_a_bar_is_shown_and_nothing_where_nothing_was_read(tmp_path: Path) -> None:
    """44 bars over 440 s: of ten readings in each, one is high; none from 100 s to 200 s."""
    samples = [
        Sample(t * S, GPU.id, memory_bytes=140 * GB if t % 10 == 5 else 0)
        for t in range(440)
        if not 100 <= t < 200
    ]
    run = run_of(tmp_path / "run", steps=even_steps(440), samples=samples, devices=[GPU])
    lines = shown(run)
    assert row(lines, "in use by all").startswith("█" * 10 + " " * 10 + "█" * 24)
    assert lines[2] == "no bar: nothing was read in that share of the time"


def test_the_phase_of_a_bar_is_the_rarest_that_was_on_in_it(tmp_path: Path) -> None:
    steps = [*even_steps(4), Step(4 * S, 6 * S, phase="eval"), *even_steps(8)[6:]]
    steps.append(Step(7 * S + 100, 7 * S + 200, phase="checkpoint"))
    samples = [Sample(t * S, GPU.id, memory_bytes=GB) for t in range(8)]
    samples.append(Sample(8 * S - 1, GPU.id, memory_bytes=GB))
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU])
    # Nine bars of 8/9 s: the evaluation from 4 s to 6 s is on in three of them.
    assert row(shown(run), "phase") == "tttteeect"


def test_a_run_without_memory_says_so(tmp_path: Path) -> None:
    (said,) = shown(run_of(tmp_path / "run", steps=even_steps(3)))
    assert said.startswith("no memory was read in this run")


def test_what_a_mark_has_beyond_the_readings_is_said_beside_them(tmp_path: Path) -> None:
    """Read 5 GB at most; the kernel's mark stood at 6, as the card's peak does."""
    host = Device("process:1", "process", "python", "process")
    samples = [
        Sample(t * S, host.id, memory_bytes=5 * GB, memory_peak_bytes=6 * GB) for t in range(8)
    ]
    run = run_of(tmp_path / "run", steps=even_steps(8), samples=samples, devices=[host])
    lines = shown(run)
    assert row(lines, "resident").endswith("  5 GB")
    assert row(lines, "up to").startswith("up to 6 GB between readings, by the kernel's mark")
    peak = summarize(run).readings["memory.process_peak_bytes"]
    assert isinstance(peak, Reading)
    assert peak.value == 6 * GB
    assert not any("nothing was read" in line for line in lines)

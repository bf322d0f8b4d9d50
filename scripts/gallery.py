"""`python scripts/gallery.py`: makes docs/gallery and docs/gallery.md from recordings of an H200.

Reports, a comparison, plots and a badge, each by the function that its command calls, from runs
that are written anew from tests/data/h200, one that is there whole, and a ledger. Anybody
can make it again. Nothing in it is typed by hand: figures in the text come out of
the same summaries, headers have no time and no name of the machine that runs this, and so the same
input gives the same files. `--pictures` adds screenshots of a page, which need a chromium. Needs
ergmeter[html].
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from ergmeter.compare.comparison import compare
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.run_curves import compared_curves
from ergmeter.compare.sources import read_entries
from ergmeter.flops.live import live_flops
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.metrics.time_breakdown import time_breakdown
from ergmeter.probes.replay import recorded_device, recorded_samples, recorded_steps
from ergmeter.records import Flops, Reading, Summary, value_text
from ergmeter.runlog.manage.pack import unpack
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.runlog.writer import Writer, create_run
from ergmeter.units import duration
from ergmeter.views.charts.plots import charts, plot
from ergmeter.views.compare import comparison_document
from ergmeter.views.document import Document
from ergmeter.views.render.html import html
from ergmeter.views.render.terminal import show
from ergmeter.views.run.card import document, next_commands, short_card
from ergmeter.views.run.model_card import badge
from ergmeter.views.run.report import page_sections

ROOT = Path(__file__).parents[1]
RECORDING = ROOT / "tests" / "data" / "h200"
RECORDED_RUNS = ROOT / "tests" / "data" / "h200_run"  # whose headers have the FLOPs of the models
WHOLE, WHOLE_PACKED = "finetune-1b", RECORDED_RUNS / "finetune.tar.gz"
LEDGER = Path("tests", "data", "h200_backends", "again.csv")  # as it is named on the page
DAY, DAY_NS = "2026-11-15", 1_794_700_800 * 10**9  # of the recording; its time of day was not kept
AFTER_NS = 10**9  # that the devices were still read for
WARMUP_STEPS = 2
VOCABULARY = 32_000
BADGE = "energy.joules_per_token"
COMMAND = "erg record --model-config config.json --seq-len 2048 -- python train.py"
SCREEN = {"width": 1280, "height": 920}  # as far as the ladder


@dataclass(frozen=True)
class Training:
    """One training of the recording: its phase there, and the run whose FLOPs are those of it."""

    phase: str
    flops_of: str | None = None


TRAININGS = {
    "train-1b": Training("full_bf16_1b", "mfu_full"),
    "stalls": Training("full_bf16_1b_stalls", "mfu_full"),
    "lora-1b": Training("lora_bf16_1b", "mfu_lora"),
    "tiny-20m": Training("tiny_20ms"),
}


# -- runs -----------------------------------------------------------------------------------------


def made_run(name: str, training: Training, folder: Path) -> Run:
    """A training of the recording as a run: what a Meter would have written beside it."""
    (phase,) = (one for one in _phases() if one["name"] == training.phase)
    began_ns, ended_ns = phase["load_start_ns"], phase["end_ns"] + AFTER_NS
    flops, settings = _work(training, phase, folder)
    run = create_run(folder / name, {"id": name, "name": name, "created": DAY, "command": []})
    header = {
        "writer": "recording",
        "source": "meter",
        "host": "a host that was not recorded",
        "clock": {"monotonic_ns": began_ns, "wall_ns": DAY_NS + began_ns},
        "settings": settings.as_json(),
        "flops": [asdict(one) for one in flops],
        "workload": _told(phase),
    }
    writer = Writer(run, header=header, devices=[recorded_device(RECORDING)])
    steps = [step for of, step in recorded_steps(RECORDING) if of == training.phase]
    samples = recorded_samples(RECORDING)
    writer.write("steps", steps)
    writer.write("samples", [one for one in samples if began_ns <= one.t_ns <= ended_ns])
    writer.close()
    marks = ({"t_ns": began_ns, "name": "opened"}, {"t_ns": ended_ns, "name": "closed"})
    lines = (json.dumps({**mark, "detail": ""}) + "\n" for mark in marks)
    (writer.directory / "marks.jsonl").write_text("".join(lines))
    return Run.open(run)


def whole_run(folder: Path) -> Run:
    """The one that ergmeter wrote itself, with all that it measures."""
    return Run.open(unpack(WHOLE_PACKED, folder))


def _phases() -> list[dict]:
    return json.loads((RECORDING / "h200_trace.json").read_text())["phases"]


def _told(phase: dict) -> dict[str, object]:
    """What was trained and how, as far as the recording says."""
    hidden, layers, *_ = phase["dims"]
    adapters = {"tuning": "lora", "lora_r": phase["lora_r"]} if phase["lora_r"] else {}
    return {
        "model": f"Llama of {layers} layers, {hidden} wide",
        "seq_len": phase["seq"],
        "batch_size": phase["batch"],
        "tuning": "full",
        "trainable_parameters": phase["trainable"],
        **adapters,
    }


def _work(training: Training, phase: dict, folder: Path) -> tuple[tuple[Flops, ...], Settings]:
    settings = Settings(dtype="bf16", warmup_steps=WARMUP_STEPS, parameters=phase["params"])
    if training.flops_of is not None:
        with tarfile.open(RECORDED_RUNS / f"{training.flops_of}.tar.gz") as packed:
            packed.extractall(folder / f".{phase['name']}", filter="data")
        (there,) = (folder / f".{phase['name']}").iterdir()
        return Run.open(there).flops, settings
    hidden, layers, inner, heads, kv_heads = phase["dims"]
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": False,
    }
    path = folder / f".{phase['name']}.json"
    path.write_text(json.dumps(config))
    flops, _, why = live_flops(path, phase["seq"], settings)
    if why:
        raise SystemExit(f"no FLOPs of {phase['name']}: {why}")
    return flops, settings


# -- what the text says ---------------------------------------------------------------------------


class Figures:
    """Figures of one run in words, for `%(key)s`: of a metric, a part of its time, a block lost."""

    def __init__(self, evidence: Evidence, summary: Summary) -> None:
        self._readings = summary.readings
        self._spent = {part.name: part for part in time_breakdown(evidence).parts}
        self._lost = {one.key: one for one in explain(evidence).blocks}

    def __getitem__(self, key: str) -> str:
        kind, _, name = key.partition(":")
        if kind == "spent":
            return f"{duration(self._spent[name].seconds)}"
        if kind == "lost":
            return f"{100 * self._lost[name].share_frac:.1f} %"
        found = self._readings[key]
        if not isinstance(found, Reading):
            raise SystemExit(f"the page quotes {key}, which is absent: {found.reason}")
        return value_text(found)


@dataclass(frozen=True)
class Picture:
    """A plot of a run: what one sees in it."""

    run: str
    kind: str
    said: str

    @property
    def file(self) -> str:
        """Where it is, beside the reports."""
        return f"{self.run}-{self.kind}.svg"


REPORTS = {
    "train-1b": "A Llama of 1.1 B, every weight trained, 8 x 2048 tokens a step in bf16:"
    " %(throughput.tokens_per_s)s, an MFU of %(utilization.mfu_frac)s,"
    " %(energy.joules_per_token)s at %(energy.mean_w)s. The board is at its power limit, which"
    " holds its clock down.",
    "stalls": "The same model in a program that sleeps for half a second after every fifth step:"
    " stalls take %(lost:stalls)s of the time, and the MFU is %(utilization.mfu_frac)s. The"
    " findings say that it is not fit to be compared, and why.",
    "lora-1b": "The same model with LoRA of rank 16: about as many tokens a second"
    " (%(throughput.tokens_per_s)s), and an MFU of %(utilization.mfu_frac)s, as frozen weights"
    " need no gradients.",
    WHOLE: "`erg train`, all weights of a model of that size in 150 steps of 16 short texts, as"
    " ergmeter measured it, the host beside the GPU. Two evaluations and a checkpoint are cut out"
    " of the training window: padding costs %(lost:padding)s of the peak, which leaves"
    " %(throughput.tokens_per_s)s and an MFU of %(utilization.mfu_frac)s. The whole run, with them"
    " and the start, makes %(throughput.whole_run_tokens_per_s)s.",
    "tiny-20m": "A model of 20 M with steps of %(time.step_s)s: the host can't launch kernels fast"
    " enough, the device has none in %(lost:idle_in_steps)s of the time, and the MFU is"
    " %(utilization.mfu_frac)s.",
}

PICTURES = (
    Picture(
        "train-1b",
        "ladder",
        "From what a driver calls utilisation (%(utilization.busy_frac)s) to the share of the peak"
        " that the model's own FLOPs are (%(utilization.mfu_frac)s). The rungs between are counters"
        " of the hardware.",
    ),
    Picture(
        "train-1b",
        "waterfall",
        "Where the rest of the peak went: %(lost:not_multiplying)s to non-matmul kernels.",
    ),
    Picture(
        "train-1b",
        "power",
        "Grey is what is not counted: the model is loaded, and the first steps warm up. Then it"
        " stays at the limit of the board, at %(energy.mean_w)s in the mean.",
    ),
    Picture(
        "train-1b",
        "clocks",
        "At the power limit the clock is what gives way.",
    ),
    Picture(
        "train-1b",
        "memory",
        "What the driver counts as held on the board: %(memory.device_peak_bytes)s at most.",
    ),
    Picture(
        "train-1b",
        "roofline",
        "Work per byte of device memory and per second, under the roof of the datasheet's peak and"
        " bandwidth. Bytes are those that the hardware counted.",
    ),
    Picture(
        "stalls",
        "steps",
        "From the beginning of a step to that of the next: half a second more after every fifth."
        " The mean is %(time.step_s)s, the median %(time.step_median_s)s.",
    ),
    Picture(
        "stalls",
        "step_times",
        "The same as a distribution: one hump, and six steps far from it.",
    ),
    Picture(
        "stalls",
        "time_spent",
        "Each instant of the run belongs to one part, so that the parts add up:"
        " %(spent:train)s of training steps, and %(spent:stall)s of stalls, which are the sleeps.",
    ),
    Picture(
        "stalls",
        "waterfall",
        "From the peak down to the model's own FLOPs. Each bar is what is lost beyond those above"
        " it: the sleeps are %(lost:stalls)s of the peak, and kernels that do not multiply"
        " %(lost:not_multiplying)s.",
    ),
    Picture(
        "lora-1b",
        "waterfall",
        "The same model with LoRA: nothing sleeps, the clock is above the one that the peak is"
        " given for, which is a gain, and %(lost:not_multiplying)s of the peak goes to kernels that"
        " do not multiply.",
    ),
    Picture(
        WHOLE,
        "energy_spent",
        "The joules of the same instants as the time: a checkpoint takes long and draws little.",
    ),
    Picture(
        WHOLE,
        "node",
        "The host beside it: a checkpoint is a core's work.",
    ),
    Picture(
        "tiny-20m",
        "activity",
        "A device that waits: some kernel is on it in %(utilization.busy_frac)s of the time, on"
        " %(activity.sm_frac)s of its SMs in the mean, and its tensor cores work in"
        " %(activity.tensor_frac)s of the cycles.",
    ),
)

_HEAD = """# Gallery

Reports and plots of recordings of a real NVIDIA H200 (driver {driver}, torch {torch}, {day} and the
day after), made by the commands that stand beside them. In a clone,
`python scripts/gallery.py --runs-only` makes the runs, in `recorded/`, from `tests/data`. Without
the option it also makes this page, its files and the figures in the text. A test compares them.

Power, energy, clocks, memory and hardware counters are as they were read, steps as the program
timed them. `{whole}` is a run as ergmeter wrote it, made anonymous. The others were recorded by
hand and brought into the same form: of the host nothing was recorded, so that its charts are
absent and say why, and their first {warmup} steps are warm-up and are not counted.
"""

_SHOTS = """
The first screen of the report of `train-1b`, in light and dark:

![the report in light colours](gallery/train-1b-light.png)
![the report in dark colours](gallery/train-1b-dark.png)
"""

_COMPARISON = f"""## A comparison

**[backends.html](gallery/backends.html)** Three ways to fine-tune a model of 1.1 B with LoRA: torch
in bf16, bitsandbytes in 4 bits, Unsloth; four rounds in turns. Ratios with their intervals, the
verdicts in words, the Pareto front, and what differs in configuration.

```bash
erg compare {LEDGER} --group-by backend --html backends.html
```
"""


def written_page(figures: dict[str, Figures]) -> str:
    """The text of docs/gallery.md."""
    facts = recorded_device(RECORDING).facts
    head = _HEAD.format(
        driver=facts["driver"], torch=facts["torch"], day=DAY, warmup=WARMUP_STEPS, whole=WHOLE
    )
    parts = [head, "## Reports\n"]
    parts.append("One file each, that needs no network. Save it and open it in a browser.\n")
    for run, said in REPORTS.items():
        parts.append(f"**[{run}.html](gallery/{run}.html)** {said % figures[run]}\n")
        parts.append(_block(f"erg report recorded/{run} --html {run}.html"))
    parts.append(f"{_SHOTS.strip()}\n")
    parts.append(_COMPARISON)
    parts.append("## Plots\n")
    for one in PICTURES:
        parts.append(f"![{one.kind} of {one.run}](gallery/{one.file})\n")
        parts.append(f"{one.said % figures[one.run]}\n")
        parts.append(_block(f"erg plot recorded/{one.run} --kind {one.kind} -o {one.file}"))
    parts.append("## A terminal\n")
    parts.append("![the card of train-1b](gallery/terminal.svg)\n")
    parts.append("What `erg record` and `erg report` print at the end.\n")
    parts.append("## A badge\n")
    parts.append("![energy per token](gallery/badge.svg)\n")
    parts.append("For a README: one figure with how it was obtained.\n")
    parts.append(_block("erg card recorded/train-1b --badge badge.svg"))
    return "\n".join(parts)


def _block(command: str) -> str:
    return f"```bash\n{command}\n```\n"


# -- files ----------------------------------------------------------------------------------------


def make_runs(folder: Path) -> dict[str, Run]:
    """The recordings as runs, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {name: made_run(name, one, folder) for name, one in TRAININGS.items()}
    return {**made, WHOLE: whole_run(folder)}


def make(docs: Path, runs: Path | None = None) -> None:
    """Write the page and its folder. The runs are kept in `runs`, where one is given."""
    folder = docs / "gallery"
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figures] = {}
    with _folder(runs) as scratch:
        for name, run in make_runs(scratch).items():
            evidence, summary = evidence_of(run), summarize(run)
            figures[name] = Figures(evidence, summary)
            page = document([(evidence, summary)], sections=page_sections(evidence, summary))
            (folder / f"{name}.html").write_text(html(page), "utf-8")
            files = {one.kind: one.file for one in PICTURES if one.run == name}
            for chart in charts(evidence, summary, files):
                (folder / files[chart.id]).write_bytes(plot(chart, name, form="svg"))
            if name == "train-1b":
                (folder / "badge.svg").write_text(badge(BADGE, summary.readings[BADGE]), "utf-8")
                (folder / "terminal.svg").write_text(terminal(evidence, summary), "utf-8")
    backends = compare(read_entries([LEDGER]), CompareOptions(("backend",)))
    page = html(comparison_document(backends, compared_curves(backends.groups)))
    (folder / "backends.html").write_text(page, "utf-8")
    (docs / "gallery.md").write_text(written_page(figures), "utf-8")


def terminal(evidence: Evidence, summary: Summary) -> str:
    """What `erg record` leaves on a terminal, as a picture without a font of its own."""
    console = Console(record=True, width=79, file=io.StringIO(), force_terminal=True)
    console.print(f"[dim]$[/] {COMMAND}\n", highlight=False)
    show(
        Document("", (short_card(evidence, summary), next_commands(Path("runs/train-1b")))), console
    )
    picture = console.export_svg(title="erg record", unique_id="terminal")
    return re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    folder = given or Path(tempfile.mkdtemp(prefix="gallery-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if given is None:
            shutil.rmtree(folder)


def take_pictures(docs: Path, chromium: str) -> None:
    """Screenshots of the head of one report, light and dark."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  only for those who ask

    page_file = (docs / "gallery" / "train-1b.html").resolve()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
        )
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport=SCREEN, color_scheme=scheme)
            page.goto(page_file.as_uri())
            page.wait_for_selector("html[data-drawn=true]", timeout=30_000)
            page.screenshot(path=page_file.with_name(f"train-1b-{scheme}.png"))
            page.close()
        browser.close()


def main() -> int:
    """Make the gallery."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "docs", metavar="DOCS")
    parser.add_argument("--runs", type=Path, help="Keep the runs in this new folder.")
    parser.add_argument("--runs-only", action="store_true", help="Make the runs and no page.")
    parser.add_argument("--pictures", action="store_true", help="Take the screenshots again too.")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    asked = parser.parse_args()
    out, runs = asked.out.resolve(), asked.runs and asked.runs.resolve()
    os.chdir(ROOT)
    if asked.runs_only:
        make_runs(runs or ROOT / "recorded")
        return 0
    make(out, runs)
    if asked.pictures:
        take_pictures(out, asked.chromium)
    size_mb = sum(one.stat().st_size for one in (out / "gallery").iterdir()) / 1e6
    sys.stdout.write(f"{out / 'gallery.md'}, {size_mb:.1f} MB in {out / 'gallery'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

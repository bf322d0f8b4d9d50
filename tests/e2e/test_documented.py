"""The commands of our pages run, on recordings of an H200 and on benches, logs and ledgers.

Each page has a folder with what its commands name. A command ends with exit code 0, or as `EXITS`
has it. What is not run here is listed with the reason, or with the test that runs it.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest

from ergmeter.cli.main import main
from tests.documented import PAGES, ROOT, SHELLS, Command, blocks, commands, erg_words, outputs
from tests.golden.inputs import GPUS, MAKERS, gpu_samples, new_run, paced, write
from tests.golden.ours import Mark, gallery

if TYPE_CHECKING:
    from collections.abc import Iterator

DATA = ROOT / "tests" / "data"
# Pages whose commands another test pastes into a shell.
ELSEWHERE = {
    "quickstart.md": "test_quickstart.py",
    "tutorial-trainium.md": "test_analyze.py",
    "from-nki-llama.md": "test_analyze.py",
    "from-sft-play.md": "test_train.py",
    "from-fms.md": "test_bench_fms.py",
    "from-efficientllm.md": "test_from_originals.py",
    "from-training-monitor.md": "test_from_originals.py",
}
# How commands begin that are parsed and not run.
ONLY_PARSED = {
    "erg record": "records a program of the reader's; test_record.py and others record",
    "erg train": "trains for minutes, some on a GPU; test_train.py trains",
    "erg bench run": "trains for minutes, some on a cluster; test_bench.py and others run benches",
    "erg load": "needs a server; test_load.py and test_tutorials.py have one",
    "erg serve": "serves until it is stopped; test_serve.py looks at its pages",
    "erg calibrate": "measures this machine for a minute; test_calibrate.py does so",
    "erg runs collect": "copies from another machine",
    "./dev": "sets up an environment",
}
# What a command names that has no meaning without a file of the reader's, or of the step before.
PARTIAL = ("$CONFIG", "$cell/run", "cache", "hf_llama3_8B_SFT_config.yaml", "v1.json")
# A gate that finds something worse, a comparison with one group, a run that is not fit.
EXITS = {
    "erg check": {0, 1},
    "erg gate": {0, 1},
    "erg bench compare": {0, 1},
}
NAMED = {"NAME": "pretrain"}  # placeholders


def is_run(command: Command) -> bool:
    """Whether a command is run here."""
    words = erg_words(command)
    if words is None or command.block.page.name in ELSEWHERE:
        return False
    text = " ".join(command.words)
    is_fragment = command.is_partial or any(word in PARTIAL for word in words)
    return not is_fragment and not text.startswith(tuple(ONLY_PARSED))


HERE = {page: [c for c in commands(page) if is_run(c)] for page in PAGES}


def copied(source: Path, target: Path) -> None:
    """A run under another name and id."""
    shutil.copytree(source, target)
    header = json.loads((target / "run.json").read_text())
    (target / "run.json").write_text(
        json.dumps({**header, "id": uuid4().hex[:16], "name": target.name})
    )


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the pages' commands name, made once."""
    folder = tmp_path_factory.mktemp("material")
    recorded = gallery().make_runs(folder / "recorded")
    assert {"train-1b", "stalls"} <= {*recorded}
    whole, slow = folder / "recorded" / "train-1b", folder / "recorded" / "stalls"
    named = "A RUN NEW REF runs/a runs/first runs/sft runs/torch runs/new runs/ref runs/trn1"
    for name in named.split():
        copied(whole, folder / name)
    for name in ("B", "runs/b", "runs/unsloth", "runs/trn1-new"):
        copied(slow, folder / name)
    for name in ("bench-ref", "bench-new", "logs", "jobs", "configs"):
        MAKERS[name](folder / name)
    (folder / "repeats").mkdir()
    for seed in range(3):
        repeat(folder / "repeats" / str(seed), seed)
    with pytest.raises(SystemExit):
        main(["bench", "report", str(folder / "bench-ref"), "--export", str(folder / "ref.csv")])
    return folder


def repeat(path: Path, seed: int) -> None:
    """A run of a minute that differs from the others of its kind by some per mille."""
    lengths_s = [1.0 + 0.004 * seed + 0.002 * (n % 3) for n in range(60)]
    steps = paced(lengths_s, tokens_computed=1000, samples=8, loss=2.0 + 0.002 * seed)
    write(
        new_run(path), ended_s=63.0, steps=steps,
        samples=gpu_samples(62.0, GPUS[:1], watts=500.0 + seed), devices=GPUS[:1],
        marks=[Mark(0, "device_used", "GPU-0")], settings={"warmup_steps": 3, "dtype": "bf16"},
        header={"workload": {"model": "m", "seq_len": 512, "seed": seed}},
    )  # fmt: skip


def gated(material: Path, folder: Path) -> None:
    """What the page on gates names: runs of one kind, alone and in folders."""
    for name, seed in {"NEW": 0, "REF": 1, "runs/new": 0, "runs/ref": 1}.items():
        shutil.rmtree(folder / name)
        copied(material / "repeats" / str(seed), folder / name)
    for name in ("new-runs", "ref-runs", "runs/repeats"):
        for seed in range(3):
            copied(material / "repeats" / str(seed), folder / name / str(seed))
    cell = folder / "results" / "exp_3"
    shutil.rmtree(cell)
    copied(material / "repeats" / "2", cell / "run")


def clone(material: Path, folder: Path, page: Path) -> None:
    """A folder as a clone of the repository, with the files that a page's commands name."""
    for name in ("configs", "examples", "scenarios", "scripts", "tests"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("A", "B", "RUN", "NEW", "REF", "recorded", "runs"):
        shutil.copytree(material / name, folder / name)
    if page.name == "ranks.md":
        shutil.rmtree(folder / "runs")
        shutil.copytree(material / "jobs", folder / "runs")
    if page.name == "importing.md":
        shutil.rmtree(folder / "runs" / "trn1")
    for name, source in {
        "results": "bench-ref", "before": "bench-ref", "after": "bench-new",
        "new": "bench-new", "ref": "bench-ref",
    }.items():  # fmt: skip
        shutil.copytree(material / source, folder / name)
    if page.name == "gate.md":
        gated(material, folder)
    shutil.copy(material / "ref.csv", folder / "reference.csv")
    shutil.copy(material / "configs" / "llama-3.1-8b.json", folder / "config.json")
    shutil.copy(ROOT / "scenarios" / "scenarios.yaml", folder / "scenarios.yaml")
    shutil.copy(DATA / "logs" / "nxdt_bars.log", folder / "train.log")
    (folder / "logs").mkdir()
    shutil.copy(DATA / "logs" / "nxdt_bars.log", folder / "logs/nki-llama_20250610_014432.log")
    shutil.copy(material / "logs" / "nvidia_smi.csv", folder / "gpus.csv")
    trace = (material / "logs" / "trace.json").read_bytes()
    (folder / "trace.json.gz").write_bytes(gzip.compress(trace))
    for ledger in ("outputs", "series"):
        (folder / ledger).mkdir()
        shutil.copy(DATA / "h200_backends/first.csv", folder / ledger / "energy_results.csv")
    for block in blocks(page):
        if block.language == "yaml" and page.name == "tutorial-bench.md":
            (folder / "quick.yaml").write_text(block.text)


@pytest.fixture
def place(material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield tmp_path
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("page", [page for page in PAGES if HERE[page]], ids=lambda p: p.name)
def test_the_commands_of_a_page_run(
    material: Path, place: Path, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clone(material, place, page)
    printed: dict[str, str] = {}
    for command in HERE[page]:
        words = [NAMED.get(word, word) for word in erg_words(command) or ()]
        if command.words[:3] == ("erg", "runs", "unpack"):
            shutil.move("runs/sft.tar.gz", "sft.tar.gz")
            shutil.rmtree("runs/sft")
        with pytest.raises(SystemExit) as ended:
            main(words)
        shown = capsys.readouterr()
        allowed = next((EXITS[name] for name in EXITS if str(command).find(name) > 0), {0})
        assert (ended.value.code or 0) in allowed, f"{command}\n{shown.out}{shown.err}"
        printed[" ".join(command.words)] = shown.out + shown.err
    for block in blocks(page):
        if block.language == "console":
            for line, quoted in outputs(block):
                compare(" ".join(line.replace('"', "").split()), quoted, printed)


def compare(line: str, quoted: list[str], printed: dict[str, str]) -> None:
    """Quoted output of the recordings and ledgers in the repository is what is printed."""
    if line in printed and re.search(r" (recorded|tests/data)\b", line):
        rows = [row.rstrip() for row in printed[line].splitlines()]
        assert [row for row in quoted if row.rstrip() not in rows] == [], line


def test_every_command_is_run_or_has_a_reason() -> None:
    """And no reason is left of a page or command that is gone."""
    shown = [c for page in PAGES for c in commands(page) if erg_words(c) is not None]
    texts = [" ".join(c.words) for c in shown]
    assert [start for start in ONLY_PARSED if not any(t.startswith(start) for t in texts)] == []
    assert [word for word in PARTIAL if not any(word in c.words for c in shown)] == []
    names = {page.name for page in PAGES}
    for page, test in ELSEWHERE.items():
        stem = page.removesuffix(".md")
        assert page in names
        assert stem in (Path(__file__).parent / test).read_text()
    assert sum(map(len, HERE.values())) > 85


def test_a_page_of_quoted_outputs_quotes_recordings() -> None:
    """So that `compare` looks at them."""
    quoted = [
        line
        for page in PAGES
        if fnmatch.fnmatch(page.name, "tutorial-*.md")
        for block in blocks(page)
        if block.language in SHELLS
        for line, rows in outputs(block)
        if rows and re.search(r" (recorded|tests/data)\b", line)
    ]
    assert len(quoted) >= 6

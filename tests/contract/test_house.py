"""The rules of the house that a tool can keep: names, plugins, imports, generated pages."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import command_reference as commands

from ergmeter import records, registry
from ergmeter.cli.main import main
from ergmeter.metrics.catalog import Metric, catalogue
from ergmeter.metrics.checks import CHECKS
from ergmeter.ports import Importer, Probe
from ergmeter.records import BASES, COLUMN_KINDS, Reported, Sample, Step
from ergmeter.views.calculate import reference

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

# A number says its unit. Counts of things are their own unit.
UNITS = ("_ns", "_s", "_w", "_j", "_bytes", "_frac", "_hz", "_c", "_g", "_wh", "_per_step", "_kwh")
COUNTED = {"index", "steps", "tokens_computed", "tokens_real", "tokens_loss", "samples"} | {
    *("micro_steps", "rank", "throttled", "loss", "learning_rate", "grad_norm"),
    *("value", "low", "high", "model_per_step", "hardware_per_step"),
    *("hardware_per_padding", "flops"),
}


def numeric_fields() -> list[tuple[str, str]]:
    found = []
    for name, thing in vars(records).items():
        if dataclasses.is_dataclass(thing) and isinstance(thing, type):
            fields = dataclasses.fields(thing)
            found += [(name, f.name) for f in fields if re.match(r"(int|float)\b", str(f.type))]
    return found


@pytest.mark.parametrize(("record", "field"), numeric_fields())
def test_a_number_in_a_record_names_its_unit(record: str, field: str) -> None:
    assert field.endswith(UNITS) or field in COUNTED


@pytest.mark.parametrize(
    ("table", "record"), [("samples", Sample), ("steps", Step), ("reported", Reported)]
)
def test_the_columns_of_a_table_are_the_fields_of_its_record(table: str, record: type) -> None:
    assert list(COLUMN_KINDS[table]) == list(record.__annotations__)


@pytest.mark.parametrize("table", COLUMN_KINDS)
def test_the_columns_of_a_table_are_on_the_page_of_the_run_format(table: str) -> None:
    page = (ROOT / "docs" / "run-format.md").read_text()
    assert [name for name in COLUMN_KINDS[table] if f"`{name}`" not in page] == []


def test_the_kind_of_a_column_follows_from_its_field() -> None:
    steps = COLUMN_KINDS["steps"]
    names = ("start_ns", "index", "phase", "loss", "rank", "host_end_ns")
    assert [steps[name] for name in names] == ["time", "count", "text", "float", "count", "count"]


@pytest.mark.parametrize("name", registry.names("probes"))
def test_a_probe_has_what_its_protocol_asks_for(name: str) -> None:
    probe = registry.load("probes", name)
    for member in ("read", "close"):
        assert callable(getattr(probe, member))
    assert probe.name == name
    assert Probe.__doc__


@pytest.mark.parametrize("name", registry.names("importers"))
def test_an_importer_keeps_its_protocol(name: str) -> None:
    importer = registry.load("importers", name)()
    assert isinstance(importer, Importer)
    assert importer.name == name
    assert not importer.recognises(["Loading weights: please wait"])
    assert list(importer.records([])) == []


@pytest.mark.parametrize("name", registry.names("sinks"))
def test_a_sink_has_what_its_protocol_asks_for(name: str) -> None:
    sink = registry.load("sinks", name)
    assert sink.name == name
    for member in ("write", "close"):
        assert callable(getattr(sink, member))
    assert f"| `{name}` |" in (ROOT / "docs" / "sinks.md").read_text()


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_is_in_the_table_of_its_page(name: str) -> None:
    assert f"| {name.replace('_', ' ')} |" in (ROOT / "docs" / "diagnose.md").read_text()


@pytest.mark.parametrize("metric", catalogue().values(), ids=lambda metric: metric.key)
def test_a_metric_is_a_whole_row_of_the_catalogue(metric: Metric) -> None:
    assert re.fullmatch(r"[a-z]+\.[a-z0-9_]+", metric.key)
    assert metric.title
    assert metric.unit
    assert metric.formula
    assert metric.direction in ("higher", "lower", "neither")
    suffixes: dict[str, str | tuple[str, ...]] = {
        "s": "_s", "J": ("_j", "_tokens"), "W": "_w", "B": "_bytes", "frac": "_frac", "Hz": "_hz",
        "C": "_c", "g": "_g", "Wh": "wh", "B/s": "_bytes_per_s", "B/h": "_bytes_per_h",
        "tokens/s": ("_per_s", "_per_device"), "samples/s": "_per_s", "steps/s": "_per_s",
    }  # fmt: skip
    if metric.unit in suffixes:
        assert metric.key.endswith(suffixes[metric.unit])
    if metric.per_device:
        assert metric.kinds


def test_no_alias_means_two_metrics() -> None:
    names = [alias.name.lower() for metric in catalogue().values() for alias in metric.aliases]
    assert len(names) == len(set(names))


def test_the_metrics_page_is_what_the_catalogue_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == reference.metrics_page(), "run ./dev docs"


def test_the_commands_page_is_what_the_commands_say() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == commands.page(), "run ./dev docs"


def test_the_commands_page_shows_the_help_that_a_user_gets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for arguments in (["-h"], ["record", "-h"], ["report", "--help"]):
        with pytest.raises(SystemExit):
            main(arguments)
        said = " ".join(capsys.readouterr().out.split())
        assert "-h, --help" in said
        assert said in " ".join(commands.page().split())


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())


COMMAND = """
from ergmeter.cli.main import main
try:
    main({!r})
except SystemExit:
    pass
"""
METERED = """
import os, tempfile
from ergmeter import Meter
os.chdir(tempfile.mkdtemp())
with Meter("run", probes=["process"]) as meter:
    with meter.step(tokens=5, samples=1) as step:
        step.loss = 0.5
"""


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import ergmeter", {"torch", "pandas", "pyarrow", "numpy", "rich", "click", "psutil"}),
        ("from ergmeter import Meter", {"torch", "pandas", "pyarrow", "numpy", "rich", "click"}),
        (METERED, {"torch", "pandas", "pyarrow.parquet", "rich", "click"}),
        (METERED + "meter.summary()", {"torch", "pandas", "rich", "click"}),
        ("import ergmeter.cli.main", {"torch", "pandas", "pyarrow", "numpy", "rich"}),
        # 0.2 s, for commands that read a configuration file.
        ("import ergmeter", {"pydantic"}),
        (METERED, {"pydantic"}),
        (COMMAND.format(["--help"]), {"pydantic"}),
        (METERED + COMMAND.format(["report", "run"]), {"pydantic"}),
        ("import ergmeter.bench.execute.runner, ergmeter.cli.compare.bench_output", {"pydantic"}),
    ],
)
def test_an_import_loads_nothing_it_does_not_need(statement: str, absent: set[str]) -> None:
    assert not loaded_by(statement) & absent


def test_blind_excepts_stand_only_where_anybodys_code_is_called() -> None:
    blind = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler):
                name = ast.unparse(node.type) if node.type else "bare"
                if name in ("bare", "Exception", "BaseException"):
                    blind.append(path.relative_to(ROOT / "src" / "ergmeter").as_posix())
    # Opening and reading probes, reading them for the doctor, a log's importer, a plugin's metric,
    # a sink; where a check that fails must not cost the card; and where our own failure must not
    # become the training's: the hand-over, the alarm and whom it tells, and what runs inside
    # somebody's program; a model that is sent to be counted, and run there, may raise anything. And
    # where a training that failed, whatever of it did, is still saved and written down, and where
    # a live page would wait forever for a run that could not be read.
    inside = {path for path in blind if path.startswith(("integrations/", "recorder/bootstrap/"))}
    assert set(blind) - inside == {
        *("doctor.py", "recorder/output.py", "sampler.py"),
        *("metrics/summarize.py", "metrics/checks.py", "meter/handover.py"),
        *("meter/sink_feed.py", "meter/alert_watch.py"),
        *("flops/counted/skeleton.py", "flops/counted/step_calls.py"),
        *("workloads/sft/training.py", "compat/efficientllm.py", "views/serve/tail.py"),
        "compat/training_monitor.py",  # any model, whose code is run to count it
    }
    assert not inside & {"integrations/batches.py", "integrations/unsettled_steps.py"}


def test_the_bases_are_ordered_from_strong_to_weak() -> None:
    assert records.weakest("measured", "reported") == "reported"
    assert records.weakest("derived", "measured") == "derived"
    assert BASES[0] == "measured"
    assert BASES[-1] == "assumed"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md")))
def test_links_between_our_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["from-fms", "from-nki-llama", "from-sft-play"])
def test_a_page_for_pasting_writes_where_git_ignores_it(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    commands = "".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
    option = r"(?:>|mkdir -p|--output|--out|--fms|results_csv=|_benchmarks\.sh 1 4)"
    targets = re.findall(rf"{option} ?\"?([a-z][\w./-]+)", commands)
    assert targets
    assert [name for name in targets if not f"{name}/".startswith(("outputs/", "runs/"))] == []
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"outputs/", "runs/", "benchmark_outputs*/", "benchmark_results*/"} <= {*ignored}

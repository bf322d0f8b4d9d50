"""The cases: every command that runs offline, in every format it has, and its errors.

Names say command, input and format. A width of 80 or 120 columns is part of the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.golden import api
from tests.golden.inputs import CONFIGS, PATTERNS, key_value_lines
from tests.golden.ours import FAMILIES
from tests.golden.running import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

WIDTHS = (80, 120)
ALL_RUNS = (
    "plain", "phases", "ranks", "cutoff", "torn", "empty", "cpu", "impossible", "calibrated",
    "alarmed", "served", "trainings", "train-1b", "stalls", "lora-1b", "tiny-20m", "demo", "rec",
    "full", "finetune-1b", "ladder", "bursts-1s", "run0", "gpt2-eager", "nano-char",
)  # fmt: skip
# Runs that are like another: without their long outputs.
SHORT_RUNS = (
    "lora-1b", "tiny-20m", "demo", "full", "bursts-1s", "run0", "impossible", "empty", "torn",
    "cpu", "rec", "nano-char",
)  # fmt: skip
COMMANDS = (
    "record", "import", "load", "train", "prepare", "compare", "bench", "gate", "report", "serve",
    "plot", "check", "explain", "card", "watch", "list", "runs", "job", "export", "doctor",
    "calibrate", "flops", "mfu", "conventions", "hlo", "analyze", "estimate", "peaks", "grid",
    "metrics", "demo",
)  # fmt: skip
SUBCOMMANDS = (
    *(("bench", name) for name in ("compare", "list", "plan", "report", "run")),
    *(
        ("runs", name)
        for name in ("tag", "note", "prune", "pack", "unpack", "anonymise", "collect")
    ),
)


def erg(name: str, line: str, *, widths: tuple[int, ...] = (120,), **more: Any) -> Iterator[Case]:
    """One command as it is typed, at each width. `;` separates commands, `|` stands for a space."""
    commands = tuple(
        ("erg", *(word.replace("|", " ") for word in part.split())) for part in line.split(";")
    )
    for width in widths:
        label = f"{name}-{width}" if len(widths) > 1 else name
        yield Case(label, commands, columns=width, **more)


def _helps() -> Iterator[Case]:
    yield from erg("help", "--help", widths=WIDTHS)
    yield from erg("help-bare", "")
    yield from erg("help-version", "--version")
    for name in COMMANDS:
        yield from erg(f"help-{name}", f"{name} --help", widths=WIDTHS)
    for group, name in SUBCOMMANDS:
        yield from erg(f"help-{group}-{name}", f"{group} {name} --help", widths=WIDTHS)


def _forms() -> Iterator[Case]:
    """Each command that shows a document, as Markdown and as a page."""
    model = "configs/llama-3.1-8b.json --seq-len 4096"
    for label, command, needs in (
        ("check", "check plain ranks", ("plain", "ranks")),
        ("job", "job pretrain --runs jobs", ("jobs",)),
        ("flops", f"flops {model}", ("configs",)),
        ("mfu", f"mfu {model} --tokens-per-s 12000 --device h100-sxm", ("configs",)),
        ("estimate", f"estimate {model} --batch-size 8 --device h200", ("configs",)),
        ("hlo", "hlo hlo --by op", ("hlo",)),
    ):
        yield from erg(
            f"{label}-md", f"{command} --md --html p.html", needs=needs, shows=("p.html",)
        )


def _reports() -> Iterator[Case]:
    for run in ALL_RUNS:
        needs = (run,)
        yield from erg(f"report-{run}", f"report {run}", needs=needs, widths=WIDTHS)
        if run not in SHORT_RUNS:
            yield from erg(f"report-{run}-all", f"report {run} --all", needs=needs)
            yield from erg(f"report-{run}-json", f"report {run} --json", needs=needs)
        yield from erg(f"check-{run}", f"check {run}", needs=needs, widths=WIDTHS)
        yield from erg(f"explain-{run}", f"explain {run}", needs=needs, widths=WIDTHS)
        yield from erg(f"card-{run}", f"card {run} --grid FR --pue 1.1", needs=needs)
        yield from erg(f"watch-{run}", f"watch {run} --once", needs=needs, widths=WIDTHS)
    yield from erg("report-failed", "report failed", needs=("failed",), widths=WIDTHS)
    yield from erg("report-failed-long", "report failed --long", needs=("failed",))
    yield from erg(
        "report-imported", "import logs/megatron.log --out run; report run", needs=("logs",),
        widths=WIDTHS,
    )  # fmt: skip
    for run in ("plain", "phases", "ranks", "torn", "calibrated", "train-1b", "stalls", "served"):
        needs = (run,)
        yield from erg(f"check-{run}-json", f"check {run} --json", needs=needs)
        yield from erg(f"explain-{run}-json", f"explain {run} --json", needs=needs)
        yield from erg(f"explain-{run}-markdown", f"explain {run} --markdown", needs=needs)
        yield from erg(f"report-{run}-memory", f"report {run} --memory", needs=needs, widths=WIDTHS)
        yield from erg(
            f"report-{run}-html", f"report {run} --html p.html", needs=needs, shows=("p.html",)
        )
    for run in ("calibrated", "stalls", "empty"):
        yield from erg(
            f"explain-{run}-html", f"explain {run} --html p.html", needs=(run,), shows=("p.html",)
        )
    yield from _report_options()


def _report_options() -> Iterator[Case]:
    for label, options in {
        "whole": "--window whole",
        "steps": "--window 10:20",
        "unbroken": "--window unbroken",
        "warmup-steps": "--warmup-steps 20",
        "warmup-s": "--warmup-s 10",
        "warmup-auto": "--warmup auto",
        "metrics": "--metric tok_per_s --metric AEC --metric mfu",
        "metric-json": "--metric j_per_token --json",
        "grid": (
            "--grid DEU --pue 1.3 --pue-source here --embodied-kg 200 --lifetime-h 20000 --all"
        ),
        "money": "--price-per-gpu-hour 2 --price-per-kwh 0.3 --currency USD --all",
        "peak": "--device a100 --dtype fp16 --all",
        "own-peak": "--peak 500T --peak-source mine --all",
        "tokens": "--tokens-per-step 500 --samples-per-step 4 --parameters 1000000 --all",
        "devices": "--devices none --num-devices 2",
        "model": "--model-config configs/llama-3.1-8b.json --seq-len 1000 --all",
        "convention": ("--model-config configs/llama-3.1-8b.json --seq-len 1000 --convention palm"),
    }.items():
        needs = ("plain", "configs") if "configs/" in options else ("plain",)
        yield from erg(f"report-options-{label}", f"report plain {options}", needs=needs)
    yield from erg("report-training-2", "report trainings --training 2", needs=("trainings",))
    yield from erg("check-training-1", "check trainings --training 1", needs=("trainings",))
    yield from erg("report-newest", "report; check; explain; card", needs=("runs",))
    yield from erg(
        "check-several",
        "check plain ranks cutoff empty",
        needs=("plain", "ranks", "cutoff", "empty"),
    )
    for label, options in {
        "rule": "--alert tokens_per_s|<|-20% --alert throttled",
        "totals": "--alert energy|>|0.01|kWh --alert time|>|60|s --alert cost|>|1",
        "more": "--alert step_s|>|+50% --alert memory|+10% --alert stalled|>|5|min",
        "budget": "--budget 0.001|kWh --steps 200",
        "rank": "--rank 0",
    }.items():
        yield from erg(
            f"watch-alarmed-{label}", f"watch alarmed --once {options}", needs=("alarmed",)
        )
    yield from erg("watch-over", "watch plain --interval 0.2", needs=("plain",))
    yield from erg("watch-directory", "watch runs --once", needs=("runs",))
    yield from erg(
        "running",
        "report running; list .; check running; runs prune . --older-than 1h",
        needs=("running",),
    )
    yield from erg(
        "card-files",
        "card plain -o card.md --badge b.svg --metric mfu --location Quebec"
        " --training-type pre-training; card plain -o card.md",
        needs=("plain",),
        shows=("card.md", "b.svg"),
    )
    yield from erg(
        "card-badge-exists",
        ("card plain --badge b.svg; card plain --badge b.svg; card plain --badge b.svg --force"),
        needs=("plain",),
    )


def _errors_of_runs() -> Iterator[Case]:
    broken = (
        "no-json",
        "other-format",
        "later-version",
        "no-writers",
        "writer",
        "noise",
        "not-a-run",
        "text.txt",
        "absent",
    )
    for name in broken:
        yield from erg(
            f"damaged-{name}",
            ";".join(
                f"{command} damaged/{name}"
                for command in (
                    "report",
                    "report --json",
                    "check",
                    "explain",
                    "card",
                    "watch --once",
                    "export --format json",
                    "runs tag",
                )
            ),
            needs=("damaged",),
        )
    yield from erg("damaged-list", "list damaged; list damaged --json", needs=("damaged",))
    yield from erg(
        "no-runs", "report; check; list; job; watch --once; card; explain; plot -o a.svg"
    )
    yield from erg(
        "no-runs-serve", "serve nowhere; serve --port 99999; serve --token short; list nowhere"
    )
    for label, line in {
        "metric": "report plain --metric tokens_per_secnd",
        "metric-2": "report plain --metric nothing_like_it",
        "window": "report plain --window sometimes",
        "window-2": "report plain --window 20:10",
        "window-3": "report plain --window 500:600",
        "grid": "report plain --grid Atlantis",
        "device": "report plain --device h2000",
        "dtype": "report plain --dtype bf61",
        "peak": "report plain --peak fast",
        "layout": "report plain --layout tp=zwei",
        "devices": "report plain --devices 7",
        "training": "report plain --training 2",
        "model": "report plain --model-config nowhere.json --seq-len 5",
        "model-alone": "report plain --model-config plain/run.json",
        "html": "report plain --html nowhere/p.html",
        "html-ending": "report plain --html p.txt",
        "option": "report plain --jsn",
        "two": "report plain plain",
        "pue": "report plain --pue 0.5",
        "warmup": "report plain --warmup-steps -1",
        "warmups": "report plain --warmup-steps 1 --warmup-s 3",
        "alert": "watch plain --once --alert tokens|often",
        "alert-2": "watch plain --once --alert loss|<|banana",
        "budget": "watch plain --once --budget much",
        "badge": "card plain --badge b.png",
        "badge-metric": "card plain --badge b.svg --metric nonsense",
        "rank": "watch plain --once --rank 9",
    }.items():
        yield from erg(f"error-report-{label}", line, needs=("plain",))


def _exports() -> Iterator[Case]:
    for form in ("json", "csv", "parquet"):
        yield from erg(
            f"export-small-{form}",
            f"export small --format {form} --out out",
            needs=("small",),
            shows=("out", "out/*"),
        )
    yield from erg(
        "export-phases-csv",
        "export phases --format csv --out out",
        needs=("phases",),
        shows=("out/steps.csv", "out/summary.csv"),
    )
    yield from erg(
        "export-again",
        ("export empty --format csv; export empty --format csv; export empty --format csv --force"),
        needs=("empty",),
        shows=("empty-export/*",),
    )
    yield from erg(
        "export-errors",
        ("export; export empty; export empty --format xml; export nowhere --format csv"),
        needs=("empty",),
    )


def _plots() -> Iterator[Case]:
    yield from erg(
        "plot-all", "plot phases --kind all -o plots", needs=("phases",), shows=("plots/*",)
    )
    yield from erg(
        "plot-calibrated",
        ("plot calibrated --kind waterfall --kind ladder --kind roofline -o plots --dark"),
        needs=("calibrated",),
        shows=("plots/*",),
    )
    yield from erg("plot-one", "plot plain -o power.svg", needs=("plain",), shows=("power.svg",))
    yield from erg("plot-png", "plot plain -o power.png", needs=("plain",), shows=("power.png",))
    yield from erg(
        "plot-errors",
        (
            "plot plain; plot plain --kind pwoer -o a.svg; plot plain -o a.gif; "
            "plot empty --kind loss -o a.svg; plot plain --kind power --kind loss "
            "-o a.svg"
        ),
        needs=("plain", "empty"),
    )


def _lists() -> Iterator[Case]:
    yield from erg("list", "list runs", needs=("runs",), widths=(60, *WIDTHS, 200))
    yield from erg("list-json", "list runs --json", needs=("runs",))
    yield from erg("list-default", "list", needs=("runs",))
    yield from erg("list-zone", "list jobs", needs=("jobs",), environment={"TZ": "Asia/Tokyo"})
    yield from erg(
        "runs-tag",
        "runs tag runs/plain; runs tag runs/plain baseline h200;"
        " runs tag runs/plain --remove h200; list runs; list runs --json; runs "
        "tag runs/plain a|b",
        needs=("runs",),
        shows=("runs/plain/labels.json",),
    )
    yield from erg(
        "runs-note",
        ("runs note runs/plain; runs note runs/plain the cooler was off; runs note runs/plain"),
        needs=("runs",),
    )
    yield from erg(
        "runs-prune",
        "runs tag runs/plain keep; runs prune runs; runs prune runs "
        "--older-than 1h;"
        " runs prune runs --older-than 1h --larger-than 100kB; runs prune runs "
        "--tag none;"
        " runs prune runs --older-than 1h --keep-newest 3 --yes; list runs",
        needs=("runs",),
    )
    yield from erg(
        "runs-prune-errors",
        (
            "runs prune nowhere; runs prune runs --older-than soon; runs prune "
            "runs --larger-than big; runs prune runs --yes"
        ),
        needs=("runs",),
    )
    yield from erg(
        "runs-pack",
        "runs pack plain; runs pack plain a.zip; runs pack plain; runs unpack "
        "a.zip there;"
        " runs unpack plain.tar.gz there; report there/plain; runs pack plain "
        "a.rar; runs unpack plain/run.json; runs unpack nowhere.zip",
        needs=("plain",),
        shows=("*.zip", "*.gz"),
    )
    yield from erg(
        "runs-anonymise",
        "runs anonymise phases clean; runs anonymise phases clean; runs "
        "anonymise phases named --name other;"
        " report clean; report named",
        needs=("phases",),
        shows=("clean/run.json", "clean/*/writer.json"),
    )
    yield from erg(
        "runs-collect",
        (
            "runs collect runs jobs all; list all; runs collect runs jobs all; "
            "runs collect nowhere all; runs collect all"
        ),
        needs=("runs", "jobs"),
    )
    yield from erg(
        "job",
        "job --runs jobs; job pretrain --runs jobs; job 17 --runs jobs",
        needs=("jobs",),
        widths=WIDTHS,
    )
    yield from erg("job-json", "job pretrain --runs jobs --json", needs=("jobs",))
    yield from erg(
        "job-errors",
        "job nothing --runs jobs; job --runs nowhere; job --runs runs",
        needs=("jobs", "runs"),
    )


def _compares() -> Iterator[Case]:
    for name, line, needs in (
        ("repeats", "compare repeats --group-by backend --anyway", ("repeats",)),
        ("repeats-plain", "compare repeats", ("repeats",)),
        ("alike", "compare alike --group-by backend --anyway", ("alike",)),
        ("sources", "compare plain phases ranks", ("plain", "phases", "ranks")),
        ("two", "compare plain calibrated --anyway", ("plain", "calibrated")),
        ("trainings", "compare trainings", ("trainings",)),
        ("recorded", "compare train-1b stalls lora-1b", ("train-1b", "stalls", "lora-1b")),
        ("ledger", "compare ledgers/first.csv", ("ledgers",)),
        ("ledgers", "compare ledgers/first.csv ledgers/again.csv --group-by backend", ("ledgers",)),
        ("sft-play", "compare ledgers/sft_play.csv", ("ledgers",)),
    ):
        widths = WIDTHS if name != "recorded" else (120,)
        yield from erg(f"compare-{name}", line, needs=needs, widths=widths)
        for form in ("json", "csv", "md"):
            if form == "json" and name == "recorded":
                continue
            yield from erg(f"compare-{name}-{form}", f"{line} --format {form}", needs=needs)
    for name, line, needs in (
        ("repeats", "compare repeats --group-by backend --anyway --x step", ("repeats",)),
        ("ledger", "compare ledgers/first.csv", ("ledgers",)),
    ):
        yield from erg(
            f"compare-{name}-html", f"{line} --html p.html", needs=needs, shows=("p.html",)
        )
    for label, options in {
        "target": "repeats/base-1 repeats/fast-1 --target-loss 2.5 --anyway",
        "baseline": (
            "repeats --group-by backend --baseline fast --anyway --confidence 0.9 --difference 1"
        ),
        "metric": ("repeats --group-by backend --anyway --metric tok_per_s --metric eval_loss"),
        "warmup": "repeats --group-by backend --anyway --warmup-steps 30",
        "by-seed": "repeats --group-by seed,backend --anyway",
    }.items():
        yield from erg(f"compare-options-{label}", f"compare {options}", needs=("repeats",))
    yield from erg(
        "compare-errors",
        "compare; compare nowhere; compare repeats --group-by bakend; compare "
        "repeats --baseline x;"
        " compare repeats --metric nonsense; compare ledgers/other.csv; "
        "compare ledgers/header.csv;"
        " compare ledgers/half.csv; compare ledgers/sft_play.csv --target-loss "
        "1;"
        " compare damaged/no-json repeats; compare empty cpu; compare repeats "
        "--format xml",
        needs=("repeats", "ledgers", "damaged", "empty", "cpu"),
    )


def _benches() -> Iterator[Case]:
    ref, new = "bench-ref", "bench-new"
    for name, target, needs in (
        ("dir", ref, (ref,)),
        ("table", "tables/ref.parquet", ("tables",)),
        ("csv", "tables/ref.csv", ("tables",)),
        ("fms", "tables/fms.csv", ("tables",)),
    ):
        yield from erg(f"bench-report-{name}", f"bench report {target}", needs=needs, widths=WIDTHS)
        for form in ("md", "csv"):
            yield from erg(
                f"bench-report-{name}-{form}", f"bench report {target} --format {form}", needs=needs
            )
        yield from erg(f"bench-report-{name}-json", f"bench report {target} --json", needs=needs)
        yield from erg(
            f"bench-report-{name}-memory",
            f"bench report {target} --memory",
            needs=needs,
            widths=WIDTHS,
        )
        yield from erg(
            f"bench-report-{name}-html",
            f"bench report {target} --html p.html",
            needs=needs,
            shows=("p.html",),
        )
    yield from erg(
        "bench-report-export",
        f"bench report {ref} --export a.csv --export a.parquet --fms fms; bench "
        f"report {ref} --export a.csv;"
        f" bench report {ref} --export a.csv --force; bench report {ref} "
        "--export a.xls;"
        f" bench report {ref} --memory --format csv; bench report a.csv; bench "
        "report a.parquet; bench report fms/benchmarks.csv",
        needs=(ref,),
        shows=("fms/*",),
    )
    yield from erg(
        "bench-list",
        (f"bench list {ref}; bench list {ref} --status oom,error; bench list {ref} --all"),
        needs=(ref,),
        widths=WIDTHS,
    )
    yield from erg("bench-list-json", f"bench list {ref} --json", needs=(ref,))
    yield from erg("bench-list-md", f"bench list {ref} --md", needs=(ref,))
    for label, words in {
        "dirs": f"{new} {ref}",
        "tables": "tables/new.parquet tables/ref.parquet",
        "noise": "tables/new.parquet tables/ref.parquet --noise 1% --noise loss=0.2%",
        "by": f"{new} {ref} --by framework_config,num_gpus,effective_batch_size",
    }.items():
        sides = ("tables",) if "tables/" in words else (ref, new)
        yield from erg(
            f"bench-compare-{label}", f"bench compare {words}", needs=sides, widths=WIDTHS
        )
        yield from erg(f"gate-{label}", f"gate {words}", needs=sides, widths=WIDTHS)
        for form in ("md", "csv", "json"):
            yield from erg(
                f"bench-compare-{label}-{form}",
                f"bench compare {words} --format {form}",
                needs=sides,
            )
            if form != "csv":
                yield from erg(f"gate-{label}-{form}", f"gate {words} --format {form}", needs=sides)
    yield from erg(
        "bench-compare-html",
        f"bench compare {new} {ref} --rule tokens_per_s|-3% --html p.html",
        needs=(ref, new),
        shows=("p.html",),
    )
    yield from erg(
        "bench-compare-where",
        f"bench compare {ref} {ref} --new-where framework_config=foak "
        "--ref-where framework_config=none --by num_gpus,effective_batch_size;"
        f" bench compare {ref} {ref} --new-where nothing=1; bench compare {ref} "
        f"{ref} --new-where framework_config=x",
        needs=(ref,),
    )
    for label, options in {
        "rules": ("--rule tokens_per_s|-3% --rule peak_memory|+2% --rule loss|+-1% --strict"),
        "plain": "--plain --rule samples_per_s|-3%",
        "missing": "--rule energy|+3%",
        "allow-missing": "--rule eval_loss|+3% --allow-missing",
        "summary": "--markdown summary.md",
        "bad-rule": "--rule token_per_s|-3%",
        "bad-size": "--rule tokens_per_s|3%",
        "bad-noise": "--noise lots",
    }.items():
        yield from erg(
            f"gate-options-{label}",
            f"gate {new} {ref} {options}",
            needs=(ref, new),
            shows=("summary.md",),
        )
    yield from erg("gate-same", f"gate {ref} {ref}", needs=(ref,))
    runs = {
        "runs": "repeats/fast-1 repeats/base-1",
        "noise-runs": "repeats/base-1 repeats/fast-1 --noise 1%",
        "ledgers": "ledgers/again.csv ledgers/first.csv",
        "other-work": "plain train-1b",
        "run-cell": "bench-new/exp_0/run bench-ref/exp_0 --noise 1%",
        "failed": "cutoff plain",
        "training": "trainings:1 trainings:2",
    }
    kinds = ("repeats", "ledgers", "plain", "train-1b", new, ref, "cutoff", "trainings")
    for label, words in runs.items():
        named = {word.partition("/")[0].partition(":")[0] for word in words.split()}
        inputs = tuple(kind for kind in kinds if kind in named)
        yield from erg(f"gate-of-{label}", f"gate {words}", needs=inputs)
    for form in ("junit", "sarif", "github"):
        yield from erg(f"gate-{form}", f"gate {new} {ref} --format {form}", needs=(new, ref))
    yield from erg(
        "gate-html", f"gate {new} {ref} --html p.html", needs=(new, ref), shows=("p.html",)
    )
    yield from erg(
        "gate-errors",
        (f"gate {ref}; gate {ref} nowhere; gate tables/damaged.parquet {ref}; gate empty {ref}"),
        needs=(ref, "tables", "empty"),
    )
    yield from erg(
        "bench-errors",
        "bench report nowhere; bench report empty; bench list nowhere; bench "
        "report tables/damaged.parquet;"
        f" bench list {ref} --status sad; bench report {ref} --by x; bench "
        f"nothing; bench compare {ref}",
        needs=(ref, "tables", "empty"),
    )
    yield from _plans()


def _plans() -> Iterator[Case]:
    for label, words in {
        "fms": "fms/scenarios.yaml --contents fms/CONTENTS.yaml --command sft_trainer",
        "fms-some": (
            "fms/scenarios.yaml --contents fms/CONTENTS.yaml --command sft_trainer "
            "--only adapters --num-gpus 1,2,4 --repeats 2 --cell-time 60"
        ),
        "template": "fms/own/template.yaml",
        "results": "fms/own/template.yaml --results bench-ref --timeout 90s",
        "ours": "fms/ours/scenarios.yaml",
        "memory": "fms/ours/scenarios.yaml --memory all --no-data",
    }.items():
        needs = ("fms", "bench-ref") if "bench-ref" in words else ("fms",)
        yield from erg(f"bench-plan-{label}", f"bench plan {words}", needs=needs, widths=WIDTHS)
        yield from erg(f"bench-plan-{label}-all", f"bench plan {words} --all", needs=needs)
        for form in ("json", "md"):
            yield from erg(
                f"bench-plan-{label}-{form}", f"bench plan {words} --{form}", needs=needs
            )
    yield from erg(
        "bench-run-dry",
        ("bench run fms/own/template.yaml --out results --dry-run --seed 3; bench list results"),
        needs=("fms",),
    )
    yield from erg(
        "bench-plan-errors",
        ";".join(
            [
                f"bench plan fms/own/bad-{name}.yaml"
                for name in ("key", "axis", "yaml", "constraint")
            ]
            + [
                "bench plan nowhere.yaml",
                "bench plan fms/own/template.yaml --only mne",
                "bench plan fms/own/template.yaml --num-gpus many",
                "bench plan fms/own/template.yaml --timeout soon",
                "bench plan fms/scenarios.yaml",
                "bench run fms/own/template.yaml",
                "bench run fms/own/template.yaml --out o --launcher lcal",
                "bench plan ledgers/other.csv",
            ]
        ),
        needs=("fms", "ledgers"),
    )


def _imports() -> Iterator[Case]:
    logs = {
        "efficientllm.log": "",
        "megatron.log": "",
        "nemo_lines.log": "",
        "nki_llama_plain.log": "",
        "nxdt_bars.log": "",
        "torchtitan.log": "",
        "keyvalue.log": "",
        "keyvalue.log.gz": "",
        "twice.log": "",
        "nvidia_smi.csv": "",
        "one_device.csv": "--one-device",
        "trace.json": "",
        "hf_pipe_bar_all_1_eval.log": "",
        "hf_pipe_bar_no_5.log": "",
        "hf_pipe_buffered_all_5.log": "",
        "hf_pipe_nobar_nonpad_1.log": "",
        "hf_pty_bar_all_1.log": "",
        "hf_pty_bar_all_5_eval.log": "",
    }
    for log, options in {**logs, **{f"{name}.log": "" for name in PATTERNS}}.items():
        label = log.replace(".", "-")
        yield from erg(
            f"import-{label}",
            f"import logs/{log} --out run {options}; report --all run; check run",
            needs=("logs",),
        )
        if log not in logs:
            continue
        yield from erg(
            f"import-{label}-json", f"import logs/{log} --out run {options} --json", needs=("logs",)
        )
    for log in ("megatron.log", "torchtitan.log", "keyvalue.log", "nvidia_smi.csv"):
        yield from erg(
            f"import-{log.replace('.', '-')}-export",
            (f"import logs/{log} --out run --name mine; export run --format csv --out out"),
            needs=("logs",),
            shows=("out/steps.csv", "out/samples.csv", "out/marks.csv", "out/reported.csv"),
        )
    yield from erg(
        "import-options",
        "import logs/keyvalue.log --format keyvalue --tokens-are step --out a "
        "--tokens-per-step 64; report a;"
        " import logs/megatron.log --out b --model-config "
        "configs/llama-3.1-8b.json --seq-len 4096 --batch-size 128 --device "
        "h100-sxm --num-devices 64; report b --all",
        needs=("logs", "configs"),
    )
    yield from erg(
        "import-stdin",
        "import - --out run; report run",
        standard_input="\n".join(key_value_lines(50)),
    )
    yield from erg(
        "import-errors",
        "import; import nowhere.log; import logs/prose.log --out a; import "
        "logs/empty.log --out a; import logs/picture.log --out a;"
        " import logs/keyvalue.log --format megatrn; import logs/keyvalue.log "
        "--format megatron --out a;"
        " import logs/one_device.csv --out a; import logs/keyvalue.log --out "
        "logs; import logs/keyvalue.log --tokens-are x; import logs",
        needs=("logs",),
    )


def _models() -> Iterator[Case]:
    for name in CONFIGS:
        yield from erg(
            f"flops-{name}",
            f"flops configs/{name}.json --seq-len 2048 --batch-size 4",
            needs=("configs",),
        )
    for name in (
        "mixtral-8x7b",
        "deepseek-v3",
        "gpt2-xl",
        "jamba-v0.1",
        "mamba-2.8b",
        "gpt-oss-20b",
    ):
        yield from erg(
            f"estimate-{name}",
            (
                f"estimate configs/{name}.json --seq-len 2048 --batch-size 8 --device "
                "h100-sxm --num-devices 8 --zero 3"
            ),
            needs=("configs",),
        )
    model = "configs/llama-3.1-8b.json"
    for label, options in {
        "width": "--seq-len 4096",
        "lora": "--seq-len 4096 --lora r=16,targets=q_proj,v_proj",
        "dora": "--seq-len 4096 --lora r=16,targets=all-linear,dora",
        "freeze": "--seq-len 4096 --freeze embed_tokens --freeze layers.0",
        "checkpointing": "--seq-len 4096 --checkpointing full",
        "lengths": "--seq-len 4096 --batch-size 2 --lengths 4096,1000,500",
        "prefill": "--seq-len 4096 --phase prefill --weights-dtype fp8",
        "decode": "--seq-len 4096 --phase decode --batch-size 8 --cache-dtype int8",
        "convention": "--seq-len 4096 --convention megatron",
        "json": "--seq-len 4096 --json",
        "params": "--seq-len 4096 --params 8e9",
    }.items():
        widths = WIDTHS if label == "width" else (120,)
        yield from erg(
            f"flops-options-{label}", f"flops {model} {options}", needs=("configs",), widths=widths
        )
    yield from erg(
        "flops-dimensions",
        (
            "flops "
            "hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256 "
            "--seq-len 2048; flops "
            "type=gpt2,hidden=1600,layers=48,heads=25,vocab=50257 --seq-len 1024"
        ),
    )
    for label, options in {
        "rate": "--tokens-per-s 10000 --device h100-sxm",
        "device-rate": (
            "--tokens-per-s-per-device 9000 --device h100-sxm --num-devices 8 --checkpointing full"
        ),
        "step": ("--batch-size 16 --step-time 12.5 --device a100 --num-devices 4 --dtype bf16"),
        "peak": "--tokens-per-s 5000 --peak 400T --peak-source mine --convention palm",
        "unknown": "--tokens-per-s 5000 --device nothing",
        "no-device": "--tokens-per-s 5000",
        "decode": "--tokens-per-s 2000 --phase decode --batch-size 16 --device h100-sxm",
        "impossible": "--tokens-per-s 5000000 --device h100-sxm",
    }.items():
        yield from erg(
            f"mfu-{label}",
            f"mfu {model} --seq-len 4096 {options}",
            needs=("configs",),
            widths=WIDTHS,
        )
        yield from erg(
            f"mfu-{label}-json", f"mfu {model} --seq-len 4096 {options} --json", needs=("configs",)
        )
    for label, options in {
        "whole": (
            "--batch-size 64 --device h100-sxm --num-devices 8 --zero 3 "
            "--checkpointing full --tokens 1e9 --mfu 0.4 --power-frac 0.8 --grid "
            "FR --pue 1.2 --price-per-hour 3 --currency EUR"
        ),
        "lora": (
            "--batch-size 8 --device a100 --lora r=16,targets=all-linear "
            "--quantize nf4 --optimizer paged-adamw-8bit --micro-batches 4 "
            "--attention flash"
        ),
        "parallel": (
            "--batch-size 64 --device h200 --tensor-parallel 2 --pipeline-parallel "
            "2 --data-parallel 4 --sequence-parallel --dtype mixed"
        ),
        "too-big": "--batch-size 64 --device a100 --num-devices 1",
        "watts": (
            "--batch-size 8 --device h100-sxm --tokens 1e8 --mfu 0.3 --watts 500 "
            "--grid-g-per-kwh 100 --grid-source me"
        ),
        "inference": (
            "--batch-size 16 --device h100-sxm --inference --weights-dtype fp8 --cache-dtype fp8"
        ),
        "own": (
            "--batch-size 8 --memory-gib 48 --usable 0.95 --optimizer adafactor "
            "--loss fused --output until-step --kv-cache --fused"
        ),
        "from-run": "--batch-size 8 --device h200 --tokens 1e8 --mfu-from plain",
    }.items():
        widths = WIDTHS if label in ("whole", "lora") else (120,)
        yield from erg(
            f"estimate-{label}",
            f"estimate {model} --seq-len 4096 {options}",
            needs=("configs", "plain"),
            widths=widths,
        )
        yield from erg(
            f"estimate-{label}-json",
            f"estimate {model} --seq-len 4096 {options} --json",
            needs=("configs", "plain"),
        )
    yield from erg(
        "model-errors",
        ";".join(
            [
                f"flops configs/{name}.json --seq-len 8"
                for name in (
                    "bad-heads",
                    "no-layers",
                    "not-json",
                    "a-list",
                    "absent",
                )
            ]
            + [
                f"flops {model}",
                "flops",
                "flops hidden=4096 --seq-len 8",
                "flops hiden=4096,layers=2 --seq-len 8",
                f"flops {model} --seq-len 0",
                f"flops {model} --seq-len 8 --convention palmm",
                f"flops {model} --seq-len 8 --lora q=1",
                f"flops {model} --seq-len 8 --lora r=4,targets=nothing",
                f"flops {model} --seq-len 8 --freeze nothing",
                f"flops {model} --seq-len 8 --lengths 9,9",
                f"flops {model} --seq-len 8 --images 1",
                f"flops {model} --seq-len 8 --weights-dtype x",
                f"mfu {model} --seq-len 8",
                f"mfu {model} --seq-len 8 --tokens-per-s 5 --step-time 3",
                f"mfu {model} --seq-len 8 --tokens-per-s -5 --device h200",
                f"mfu {model} --seq-len 8 --tokens-per-s 5 --device h200 --dtype fp3",
                f"estimate {model}",
                f"estimate {model} --seq-len 8 --optimizer adm",
                f"estimate {model} --seq-len 8 --device h2000",
                f"estimate {model} --seq-len 8 --tokens 1e9 --mfu 40",
                f"estimate {model} --seq-len 8 --batch-size 3 --num-devices 2",
                f"estimate {model} --seq-len 8 --quantize nf4",
                f"estimate {model} --seq-len 8 --mfu-from empty",
                f"estimate {model} --seq-len 8 --zero 4",
            ]
        ),
        needs=("configs", "empty"),
    )


def _families() -> Iterator[Case]:
    for name, family in FAMILIES.items():
        size = "x".join(map(str, family.image_size or ()))
        options = f"--images 2 --image-size {size}" if size else "--source-len 16"
        line = f"flops families/{name}.json --seq-len 512 --batch-size 2"
        yield from erg(f"flops-family-{name}", f"{line}; {line} {options}", needs=("families",))


def _references() -> Iterator[Case]:
    yield from erg("metrics", "metrics", widths=WIDTHS)
    yield from erg("metrics-markdown", "metrics --markdown")
    yield from erg(
        "metrics-one",
        ";".join(
            f"metrics {name}"
            for name in (
                "mfu",
                "tok_per_s",
                "AEC",
                "energy.joules_per_token",
                "latency.ttft_median_s",
                "TT",
                "j_per_token",
                "goodput",
                "memory.device_peak_bytes",
            )
        ),
        widths=WIDTHS,
    )
    yield from erg(
        "metrics-errors", "metrics mfuu; metrics nonsense; metrics mfu tokens; metrics --jsn"
    )
    yield from erg("conventions", "conventions", widths=WIDTHS)
    yield from erg("conventions-json", "conventions --json")
    yield from erg("conventions-markdown", "conventions --markdown")
    yield from erg(
        "conventions-one",
        (
            "conventions palm; conventions megatron; conventions exact; "
            "conventions palm --json; conventions plam"
        ),
    )
    yield from erg("peaks", "peaks", widths=WIDTHS)
    yield from erg("peaks-json", "peaks --vendor google --json")
    yield from erg("peaks-markdown", "peaks --markdown")
    yield from erg(
        "peaks-one",
        (
            "peaks h100-sxm; peaks NVIDIA|H200; peaks a100 --json; peaks trn1; "
            "peaks mi300x; peaks tpu"
        ),
        widths=WIDTHS,
    )
    yield from erg(
        "peaks-some",
        ("peaks --vendor aws; peaks --dtype fp8; peaks --vendor amd --dtype fp4 --json"),
    )
    yield from erg(
        "peaks-errors",
        ("peaks h2000; peaks --vendor nvida; peaks --dtype bf61; peaks h100 --vendor amd"),
    )
    yield from erg("grid", "grid", widths=WIDTHS)
    yield from erg("grid-json", "grid --json")
    yield from erg(
        "grid-one", ("grid france; grid FR; grid CAMX; grid DEU --json; grid Frence; grid Atlantis")
    )


def _graphs() -> Iterator[Case]:
    yield from erg("hlo-all", "hlo hlo", needs=("hlo",), widths=WIDTHS)
    yield from erg("hlo-json", "hlo hlo --json", needs=("hlo",))
    yield from erg(
        "hlo-compiled", "hlo hlo", needs=("hlo",), environment={"ERGMETER_COMPILED": "1"}
    )
    for by in ("module", "op", "computation", "kernel"):
        yield from erg(f"hlo-by-{by}", f"hlo hlo --by {by}", needs=("hlo",))
    for name in (
        "nki_torchxla_wrapped_3calls",
        "while_dynamic.unopt",
        "fft.unopt",
        "scan_dot_L12.opt",
        "cond_uneven.unopt",
        "nki_bad_base64",
    ):
        yield from erg(
            f"hlo-{name.replace('.', '-')}",
            f"hlo hlo/{name}.hlo_module.pb -v; hlo hlo/{name}.hlo_module.pb --json",
            needs=("hlo",),
        )
    yield from erg(
        "hlo-errors",
        (
            "hlo; hlo nowhere; hlo hlo/damaged.hlo_module.pb; hlo "
            "hlo/cut.hlo_module.pb; hlo empty; hlo hlo --by x"
        ),
        needs=("hlo", "empty"),
    )
    files = "--config neuron/llama3_8b_sft.yaml --model-config neuron/config.json"
    full = (
        "--compile-dir neuron/cache --log-file neuron/train.log --hw-backend "
        "trn1 --calculate-score"
        " --per-file-scores --detailed --print-per-file --base-mfu 10 "
        "--base-throughput 1"
    )
    for label, options in {
        "full": f"{full} --output out.json",
        "compat": f"{full} --compat --output out.json",
        "json": f"{full} --json",
        "md": f"{full} --format md",
        "markdown": (
            "--compile-dir neuron/cache --log-file neuron/train.log --calculate-score "
            "--per-file-scores --base-mfu 10 --base-throughput 1 --md"
        ),
        "throughput": "--throughput 2.1 --compile-dir neuron/cache --output out.json",
        "given": (
            "--throughput 2.1 --compile-dir neuron/cache --batch-size 32 --seq-len "
            "2048 --num-nodes 2 --devices 16 --hw-backend trn2 --lnc 2 --dtype fp8 "
            "--convention palm --output out.json"
        ),
        "runs": (
            "--throughput 2.1 --compile-dir neuron/cache --graph-runs "
            "neuron/runs.txt --output out.json --calculate-score"
        ),
        "module": (
            "--throughput 2.1 --compile-dir neuron/cache --module "
            "MODULE_77+00000000 --modules-from-log --log-file neuron/train.log "
            "--output out.json"
        ),
        "since": (
            "--throughput 2.1 --compile-dir neuron/cache --since 2026-01-01 "
            "--until 2026-03-01 --compiler-version neuronxcc-2.18.121.0+9e31e41a "
            "--output out.json"
        ),
    }.items():
        yield from erg(
            f"analyze-{label}",
            f"analyze {files} {options}",
            needs=("neuron",),
            shows=("out.json",),
            widths=WIDTHS if label == "full" else (120,),
        )
    yield from erg(
        "analyze-html",
        f"analyze {files} {full} --html p.html --output out.json",
        needs=("neuron",),
        shows=("p.html",),
    )
    yield from erg(
        "analyze-lora",
        (
            "analyze --config neuron/llama3_8b_lora.yaml --model-config "
            f"neuron/config.json {full} --output out.json"
        ),
        needs=("neuron",),
        shows=("out.json",),
    )
    for log in ("nki_llama_plain", "nemo_lines", "nxdt_bars", "megatron", "keyvalue"):
        yield from erg(
            f"analyze-log-{log}",
            f"analyze {files} --compile-dir neuron/cache --log-file logs/{log}.log --json",
            needs=("neuron", "logs"),
        )
    made = f"analyze {files} --compile-dir neuron/cache --output"
    pair = (
        f"{made} a.json --throughput 2.1 --calculate-score; {made} b.json "
        "--throughput 2.4 --calculate-score"
    )
    for form in ("text", "json", "md"):
        yield from erg(
            f"analyze-compare-{form}",
            f"{pair}; analyze --compare a.json b.json --format {form}",
            needs=("neuron",),
        )
    yield from erg(
        "analyze-compare-html",
        f"{pair}; analyze --compare a.json b.json --html p.html",
        needs=("neuron",),
        shows=("p.html",),
    )
    yield from erg(
        "analyze-errors",
        ";".join(
            f"analyze {words}"
            for words in (
                "",
                "--config neuron/llama3_8b_sft.yaml",
                f"{files} --compile-dir nowhere",
                f"{files} --log-file nowhere.log",
                f"{files} --graph-runs none",
                f"{files} --batch-size 0",
                f"{files} --throughput nan",
                f"{files} --devices 64 --compile-dir neuron/cache",
                f"{files} --hw-backend p5",
                f"{files} --convention mine",
                f"{files} --output nowhere/out.json",
                f"{files} --compile-dir neuron/train.log",
                "--compare a.json",
                "--compare neuron/config.json neuron/config.json",
                "--config neuron/bad.yaml --model-config neuron/config.json",
                "--config nowhere.yaml --model-config neuron/config.json",
                f"{files} --since soon --compile-dir neuron/cache",
            )
        ),
        needs=("neuron",),
    )
    words = ("calculate_training_metrics.py", *files.split(), *full.split(), "--output", "out.json")
    yield Case(
        "analyze-script", (words, (words[0], "--help"), (words[0],)), ("neuron",), ("out.json",)
    )


def _live_errors() -> Iterator[Case]:
    """Commands that measure: just what they refuse before they begin."""
    for label, line in {
        "unknown": "reprt; nonsense; --nonsense; train.py",
        "record": "record; record --; record --sink nothing -- true; record --sink "
        "csv:nothing=1 -- true; record --alert often -- true;"
        " record --stop-on sadness -- true; record --budget much -- true; "
        "record --probe nothing -- true; record --interval 0 -- true;"
        " record --grid Atlantis -- true; record --tokens-are x -- true; "
        "record --alert-webhook x -- true; record --warmup-steps -1 -- true; "
        "record --out plain -- true",
        "load": "load; load http://127.0.0.1:1; load nonsense --model m; load "
        "http://127.0.0.1:1 --model m --concurrency x; load http://127.0.0.1:1 "
        "--model m --slo x=1;"
        " load http://127.0.0.1:1 --model m --concurrency 2 --rate 3; load "
        "http://127.0.0.1:1 --model m --prompts nowhere.jsonl; load "
        "http://127.0.0.1:1 --model m --body x;"
        " load http://127.0.0.1:1 --model m --header x; load "
        "http://127.0.0.1:1 --model m --max-error-rate x; load ftp://h --model "
        "m",
        "train": (
            "train; train --config nowhere.yaml; train --config ledgers/other.csv; "
            "train --config t/a.yaml --set nothing=1; train --config t/a.yaml "
            "--set x"
        ),
        "prepare": ("prepare; prepare --config nowhere.yaml; prepare --config ledgers/other.csv"),
        "calibrate": "calibrate --device; calibrate --nothing; calibrate extra",
        "demo": "demo --seconds 0; demo --device gpu; demo extra",
        "doctor": "doctor extra; doctor --nothing",
        "watch": "watch nowhere; watch --interval 0.1; watch --rank -1",
        "serve": "serve nowhere; serve --host; serve plain/run.json",
    }.items():
        yield from erg(f"error-{label}", line, needs=("plain", "ledgers"))


def cases() -> list[Case]:
    """All of them, by name."""
    found = [
        case
        for several in (
            _helps(),
            _forms(),
            _reports(),
            _errors_of_runs(),
            _exports(),
            _plots(),
            _lists(),
            _compares(),
            _benches(),
            _imports(),
            _models(),
            _families(),
            _references(),
            _graphs(),
            _live_errors(),
        )
        for case in several
    ]
    found += [Case(name, call=call, needs=needs) for name, (call, needs) in api.CALLS.items()]
    names = [case.name for case in found]
    assert len(names) == len(set(names)), "two cases have the same name"
    return sorted(found, key=lambda case: case.name)

"""Which importer reads a log, and what is said where none does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter import registry
from ergmeter.errors import FormatError, PluginError, UsageError
from ergmeter.importers.importing import ImportRequest, import_log
from ergmeter.importers.log import read_log
from ergmeter.importers.logfile import make_importers
from ergmeter.importers.megatron import MegatronImporter
from tests.unit.importers.programs import (
    TITAN_STARTS,
    efficientllm,
    megatron,
    nxdt,
    titan,
)
from tests.unit.importers.trained import BAR, printed

DATA = Path(__file__).parents[2] / "data" / "logs"
LOOP = [f"step={n} loss=2.5 tokens_per_step=64" for n in range(1, 6)]
TRAINER = [
    line
    for n in range(1, 6)
    for line in (BAR.format(f"{n}/5"), printed(n / 5), BAR.format(f"{n}/5"))
]


def log_of(tmp_path: Path, *texts: str) -> Path:
    path = tmp_path / "train.log"
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("texts", "name"),
    [
        (LOOP, "keyvalue"),
        (TRAINER, "hf_trainer"),
        ([megatron(n, 6 * n) for n in range(1, 6)], "megatron"),
        ([TITAN_STARTS, *(titan(n, n) for n in range(1, 6))], "torchtitan"),
        ([nxdt(n, 20 * n) for n in range(1, 6)], "nxdt"),
        (["step_time: 1.5", "loss: 2.5"] * 5, "nxdt"),
        ([line for n in range(1, 6) for line in efficientllm(n)], "efficientllm"),
        # A loop's own line, a known program's after it.
        ([LOOP[0], *(megatron(n, 6 * n) for n in range(1, 6))], "megatron"),
        ([LOOP[0], *(["noise"] * 500), *(nxdt(n, 20 * n) for n in range(1, 6))], "nxdt"),
        ([LOOP[0], *TRAINER], "hf_trainer"),
        (["throughput: 150.5", *(titan(n, n) for n in range(1, 6))], "torchtitan"),
    ],
)
def test_the_importer_that_knows_the_program_is_chosen(
    tmp_path: Path, texts: list[str], name: str
) -> None:
    parsed = read_log(log_of(tmp_path, "loading weights", *texts))
    assert parsed.format == name
    assert len(parsed.last) == 5


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (LOOP[0], "keyvalue"),
        (megatron(1, 6), "megatron"),
        (titan(1, 1), "torchtitan"),
        (nxdt(1, 20), "nxdt"),
        ("step_time: 1.5", "nxdt"),
        ("step 3: loss: 2.5 tokens/sec: 5000 tokens: 4096", "keyvalue"),
        (efficientllm(1)[0], "efficientllm"),
    ],
)
def test_the_first_importer_in_order_that_recognises_a_line_knows_its_program(
    text: str, name: str
) -> None:
    importers = make_importers({})
    assert next(i.name for i in importers if i.recognises([text])) == name


def test_an_importer_that_is_no_subclass_of_the_protocol_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "names", lambda kind: ["theirs"])
    monkeypatch.setattr(registry, "load", lambda kind, name: object)
    with pytest.raises(
        PluginError, match=r"'theirs' is not a subclass of ergmeter\.ports\.Importer"
    ):
        make_importers({})


def test_bars_and_dicts_of_one_training_are_not_counted_twice(tmp_path: Path) -> None:
    parsed = read_log(log_of(tmp_path, *TRAINER))
    assert parsed.last.step.tolist() == [1, 2, 3, 4, 5]
    assert parsed.last.loss.tolist() == [2.5] * 5


def test_a_format_can_be_named(tmp_path: Path) -> None:
    log = log_of(tmp_path, *LOOP, *(megatron(n, 6 * n) for n in range(1, 3)))
    assert read_log(log).format == "megatron"
    named = read_log(log, format="keyvalue")
    assert named.format == "keyvalue"
    assert named.recognised == LOOP[0]
    with pytest.raises(UsageError, match="no format 'megatrn'; there are efficientllm, hf_trainer"):
        read_log(log, format="megatrn")


def test_where_nothing_is_recognised_it_is_said_what_was_looked_for(tmp_path: Path) -> None:
    log = log_of(tmp_path, "first line", "", "second line", "third", "fourth")
    with pytest.raises(FormatError) as said:
        read_log(log)
    text = str(said.value)
    assert "\n" not in text
    assert "no training step recognised in 5 lines" in text
    assert "it begins 'first line' / 'second line' / 'third'" in text
    for name in registry.names("importers"):
        assert name in text or registry.load("importers", name)().looks_for in text
    assert len(text) - len(str(log)) < 300
    with pytest.raises(FormatError) as named:
        read_log(log, format="megatron")
    assert MegatronImporter().looks_for in str(named.value)
    with pytest.raises(FormatError, match=r"; --format NAME chooses a reader$"):
        import_log(ImportRequest(log))
    with pytest.raises(FormatError, match=r"is empty$"):
        import_log(ImportRequest(_empty(tmp_path)))


def test_the_line_that_spoke_for_a_format_is_cut_between_words_and_that_is_seen(
    tmp_path: Path,
) -> None:
    line = "step=3 loss=2.1 tokens=4096 " + "because words " * 20
    shown = read_log(log_of(tmp_path, line)).recognised
    assert len(shown) <= 120
    assert shown.endswith((" because ...", " words ..."))


def _empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.log"
    path.touch()
    return path


@pytest.mark.parametrize("before", [0, 200])
@pytest.mark.parametrize("first", ["", "timestamp, "])
def test_a_training_that_printed_nvidia_smi_is_read_as_the_training(
    tmp_path: Path, first: str, before: int
) -> None:
    printed = f"{first}index, name, memory.used [MiB], utilization.gpu [%]\n"
    printed += f"{first and '2026/11/15 10:00:00.000, '}0, NVIDIA H100 80GB HBM3, 4 MiB, 0 %\n"
    printed += "loading\n" * before
    whole = (DATA / "megatron.log").read_text()
    (tmp_path / "alone.log").write_text(whole)
    (tmp_path / "both.log").write_text(printed + whole)
    alone = import_log(ImportRequest(tmp_path / "alone.log", tmp_path / "alone"))
    both = import_log(ImportRequest(tmp_path / "both.log", tmp_path / "both"))
    assert both.choice.importer.name == "megatron"
    assert [run.steps for run in both.runs] == [run.steps for run in alone.runs]
    assert both.runs[0].steps > 0

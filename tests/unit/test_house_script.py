"""scripts/house.py on a small package whose measures are counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import house
from scripts.house import ROOT, Measure, main, measures, with_sections

PROJECT = """
[project.entry-points."ergmeter.probes"]
# amd = "ergmeter.probes.amd:AmdProbe"
nvml = "ergmeter.probes.nvml:NvmlProbe"
"""
FILES = {
    "__init__.py": '_HOMES = {"Run": "runlog.reader"}\n',
    # 6 lines of code: the import, the class, the field, def and its two lines.
    "records.py": '''"""Records.

The
trap: a formula.
"""

from dataclasses import dataclass  # a comment


class Sample:
    """Kept."""

    power_w: float = 0.0
    """A field."""

    # A comment.
    def told(self, found: int) -> str:
        """Return a text."""
        return f"""{found}

"""
''',
    "probes/__init__.py": "",
    # One importer beside it, but also an entry point.
    "probes/nvml.py": "from ..records import Sample as Other\nclass Sample: ...\n",
    "probes/amd.py": "import ergmeter.probes.nvml\nfrom ergmeter.probes import gpm\n",
    "probes/gpm.py": "class _Private: ...\nclass ErgmeterCallback: ...\n",  # a splinter
    "runlog/__init__.py": "",
    "runlog/reader.py": "from ergmeter.runlog import kept, segments\n",  # loaded by name
    "runlog/kept.py": "async def one(seen, *, _told): ...\n",  # a splinter
    "runlog/segments.py": "\n" * 60 + "class ErgmeterCallback: ...\n",  # long enough
    "sampler.py": """
from contextlib import suppress
with suppress(OSError, Exception):  # noqa: BLE001
    pass
# A plugin may raise anything.
with suppress(Exception):
    pass
try:
    pass
except (ValueError, BaseException):  # noqa: BLE001  never break training
    pass
except OSError:
    pass
except:
    pass
""",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    for name, text in FILES.items():
        path = tmp_path / "src" / "ergmeter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def measured(root: Path) -> dict[str, Measure]:
    return {row.key: row for row in measures(root)}


def test_a_folder_may_have_15_modules_beside_its_init(root: Path) -> None:
    folder = root / "src" / "ergmeter" / "sinks"
    folder.mkdir()
    for number in range(15):
        (folder / f"sink_{number}.py").touch()
    (folder / "__init__.py").touch()
    assert measured(root)["folders"].value == 0
    (folder / "__main__.py").touch()
    assert measured(root)["folders"].offenders == ["16 ergmeter.sinks"]


def test_a_public_class_has_one_module(root: Path) -> None:
    row = measured(root)["classes"]
    assert row.offenders == ["Sample: ergmeter.probes.nvml, ergmeter.records"]


def test_vague_names_are_listed_and_their_share_is_of_all_bound_names(root: Path) -> None:
    rows = measured(root)
    assert rows["vague-names"].offenders == [
        "ergmeter.records:17 told: function",
        "ergmeter.runlog.kept: module",
        "ergmeter.runlog.kept:1 one: function",
    ]
    # told, found, one, seen and _told; beside _HOMES, power_w, self and five classes.
    assert (rows["vague-share"].value, rows["vague-share"].limit) == (5, 0)
    assert rows["vague-share"].detail.startswith("38.46 % of 13")


def test_the_share_must_be_under_one_percent(root: Path) -> None:
    path = root / "src" / "ergmeter" / "names.py"
    path.write_text("a = 1\n" * (499 - 13))
    assert measured(root)["vague-share"].limit == 4
    path.write_text("a = 1\n" * (501 - 13))
    assert measured(root)["vague-share"].limit == 5


def test_a_splinter_has_one_importer_in_its_folder_and_under_60_lines(root: Path) -> None:
    row = measured(root)["splinters"]
    assert row.offenders == [
        "ergmeter.probes.gpm: 2 lines, imported by ergmeter.probes.amd",
        "ergmeter.runlog.kept: 1 lines, imported by ergmeter.runlog.reader",
    ]
    assert row.detail == "3 of any length, 64 lines"


@pytest.mark.parametrize(
    "text",
    [
        "from ergmeter.probes import gpm",
        'f"ergmeter.probes.{name}"',
        'LAZY = "ergmeter.probes.gpm"',
    ],
)
def test_an_importer_elsewhere_or_a_load_by_name_makes_it_no_splinter(
    root: Path, text: str
) -> None:
    (root / "src" / "ergmeter" / "registry.py").write_text(text)
    assert all("gpm" not in line for line in measured(root)["splinters"].offenders)


def test_blank_lines_comments_and_docstrings_are_no_code(root: Path) -> None:
    rows = measured(root)
    assert "6 ergmeter.records" in rows["code-lines"].offenders
    assert "13 ergmeter.sampler" in rows["code-lines"].offenders


def test_blind_excepts_and_traps_are_counted(root: Path) -> None:
    rows = measured(root)
    assert rows["blind-excepts"].detail == "2 except, 2 suppress"
    assert rows["unexplained-excepts"].offenders == ["ergmeter.sampler:14", "ergmeter.sampler:3"]
    assert rows["traps"].offenders == ["ergmeter.records:1"]


def test_check_fails_for_the_first_six_and_for_limits_that_are_set(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "4 of 6 checked limits broken: classes, vague-names, vague-share, unexplained-excepts\n"
    assert main(["--root", str(root)]) == 0
    assert main(["--root", str(root), "--check"]) == 1
    assert capsys.readouterr().out.count(said) == 2
    allowed = ["classes=1", "vague-names=3", "vague-share=5", "splinters=2"]
    allowed.append("unexplained-excepts=2")
    limits = [word for limit in allowed for word in ("--limit", limit)]
    assert main(["--root", str(root), "--check", *limits]) == 0
    assert main(["--root", str(root), "--check", *limits, "--limit", "modules=1"]) == 1
    monkeypatch.setattr(house, "CODE_LINES", 1)
    assert main(["--root", str(root), "--check", *limits]) == 1
    with pytest.raises(SystemExit):
        main(["--root", str(root), "--limit", "modules"])


def test_the_map_in_the_docs_is_that_of_the_source() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page == with_sections(page, ROOT), "run ./dev docs"
    rows = [row.split("|") for row in page.splitlines() if row.startswith("| `")]
    assert {"map", "modules"} < set(page.split())
    assert [row[1] for row in rows if len(row[2].strip()) <= 10] == [], "no purpose is given"

"""The data stage: no two wishes share a file, and drivers may make it at once."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ergmeter.bench.plan import data
from ergmeter.bench.plan.cells import BenchPlan
from ergmeter.errors import FormatError

# Takes its time to make the data.
DRIVER = """
import json, sys, time
from pathlib import Path
from ergmeter.bench.plan import data
from ergmeter.bench.plan.cells import BenchPlan
loaded = data.loaded
def slowly(*names, **options):
    time.sleep(1.0)
    return loaded(*names, **options)
data.loaded = slowly
Path(f"ready-{sys.argv[2]}").touch()
while not Path("go").exists():
    time.sleep(0.01)
job = json.loads(sys.argv[1])
data.prepare(BenchPlan("s", (), settings={"data": [job]}), Path("data"))
"""


def job(stanza: dict[str, Any] | None = None, **more: Any) -> data.DataJob:
    known: dict[str, Any] = {
        "model": "org/a-b", "response_template": None, "text_field": None, "as_pairs": False,
    }  # fmt: skip
    return data.data_job({"dataset_name": "org/data", **(stanza or {})}, **{**known, **more})


def test_no_two_wishes_have_one_file(tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    for path in (here, there):
        path.write_text(json.dumps({"instruction": path.name, "output": "3"}))
    token = {"tokenize": True}
    files = [
        one.file
        for one in (
            job(),
            job({"dataset_name": "org/other"}),
            job({"dataset_name": str(here)}),
            job({"dataset_name": str(there)}),
            job({"dataset_split": "train[:10]"}),
            job({"chat_template": "{{ messages }}"}),
            job({"chat_template": "{{ messages[0] }}"}),
            job(response_template="A:"),  # an argument of a scenario, under a shared stanza
            job(text_field="text"),
            job(as_pairs=True),
            job(token),
            job(token, model="org/a_b"),  # in FMS's names these three are one
            job(token, model="org-a/b"),
            job(token, model="org_a_b"),
        )
    ]
    for one, other in itertools.combinations(files, 2):
        assert one != other
    assert job(model="org/x").file == job(model="org/y").file  # no tokenizer has a part in it
    assert job(token).file == job(dict(token)).file


def test_data_that_changed_is_other_data(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "a", "output": "1"}')
    before = job({"dataset_name": str(path)})
    path.write_text('{"instruction": "a", "output": "2"}')
    after = job({"dataset_name": str(path)})
    assert before.file != after.file
    for made in (before, after):
        plan = BenchPlan("s", (), settings={"data": [asdict(made)]})
        data.prepare(plan, tmp_path / "data")
    there = {path.name for path in (tmp_path / "data").iterdir()}
    assert {before.file, after.file} <= there


def test_drivers_that_come_at_once_leave_one_complete_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a", "output": "1"}\n' * 50)
    wanted = asdict(job({"dataset_name": "rows.jsonl"}))
    drivers = [
        subprocess.Popen([sys.executable, "-c", DRIVER, json.dumps(wanted), str(one)], cwd=tmp_path)
        for one in range(3)
    ]
    until_s = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 3 and time.monotonic() < until_s:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert [driver.wait(60) for driver in drivers] == [0, 0, 0]
    assert len((tmp_path / "data" / wanted["file"]).read_text().splitlines()) == 50
    left = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert left == [wanted["file"]]


def test_one_that_failed_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    wanted = asdict(job({"dataset_name": str(tmp_path / "rows.jsonl")}))
    plan = BenchPlan("s", (), settings={"data": [wanted]})
    for _ in range(2):
        with pytest.raises(FormatError, match="holds no example"):
            data.prepare(plan, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []

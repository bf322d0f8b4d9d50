"""A scan of a directory: what it costs, also with tables and pipes in it, and from many threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ergmeter.compare.ledgers import is_ledger
from ergmeter.views.serve import folder as folders
from ergmeter.views.serve.folder import Folder, ServedItem
from tests.unit.views.serving import a_run

LEDGER = "tok_per_s,tokens_processed,wall_s\n1,2,3\n"


def scanned(folder: Folder) -> list[str]:
    """The ledgers of a scan that is made now."""
    folder._scanned_s = float("-inf")
    return [place.name for place in folder.items("ledger")]


def test_a_table_is_looked_at_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "energy.csv"
    table.write_text(LEDGER)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    looked: list[str] = []

    def noted(path: Path) -> bool:
        looked.append(path.name)
        return is_ledger(path)

    monkeypatch.setattr(folders, "is_ledger", noted)
    folder = Folder(tmp_path)
    assert scanned(folder) == scanned(folder) == ["energy.csv"]
    assert sorted(looked) == ["energy.csv", "other.csv"]
    table.write_text("a,b\n")
    assert scanned(folder) == []
    assert sorted(looked) == ["energy.csv", "energy.csv", "other.csv"]


def test_a_pipe_that_is_called_a_table_holds_up_no_scan(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.csv")
    (tmp_path / "energy.csv").write_text(LEDGER)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(scanned(Folder(tmp_path))), daemon=True)
    thread.start()
    thread.join(20.0)
    assert found == ["energy.csv"]


def test_who_asks_during_a_scan_waits_for_it_and_makes_none(tmp_path: Path) -> None:
    a_run(tmp_path / "one")
    walks: list[int] = []

    class Slow(Folder):
        def _walk(self, left_out: list[str]) -> Iterator[ServedItem]:
            walks.append(1)
            time.sleep(0.1)
            return super()._walk(left_out)

    folder = Slow(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: [p.name for p in folder.items("run")], range(8)))
    assert found == [["one"]] * 8
    assert len(walks) == 1


def test_stamps_that_are_made_during_a_scan_do_not_end_it(tmp_path: Path) -> None:
    """As another thread makes them: the dictionary grows while it is gone through."""
    a_run(tmp_path / "one")
    folder = Folder(tmp_path)

    class Growing(dict[str, tuple[float, str, int]]):
        def items(self) -> Iterator[tuple[str, tuple[float, str, int]]]:  # type: ignore[override]
            for number, one in enumerate(super().items()):
                self[f"more {number}"] = (0.0, "", 0)
                yield one

    folder._stamps = Growing({"gone": (0.0, "", 0), "another": (0.0, "", 0)})
    assert [place.name for place in folder.items("run")] == ["one"]
    assert not folder._stamps

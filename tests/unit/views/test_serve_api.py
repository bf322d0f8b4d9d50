"""What `erg serve` says as JSON: the same figures as the commands, bounded, and never wrong."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from ergmeter.metrics import timeline
from ergmeter.records import Device, Mark, Sample
from ergmeter.runlog.identity import writer_header
from ergmeter.runlog.manage.labels import annotate, tag
from ergmeter.runlog.writer import Writer
from ergmeter.views.render.html import vega
from ergmeter.views.serve import api, pages
from ergmeter.views.serve.pool import Pool
from tests.runs import GPU, make_run
from tests.unit.views.serving import HOSTILE, a_run, client, ids, until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    a_run(tmp_path / "runs" / "slow")
    a_run(tmp_path / "runs" / "deep" / "down" / "fast", steps=30)
    return tmp_path / "runs"


@pytest.fixture
def app(root: Path) -> Iterator[TestClient]:
    with client(root) as made:
        yield made


def test_the_list_is_there_at_once_and_its_figures_follow(app: TestClient) -> None:
    first = app.get("/api/runs").json()
    assert [row["name"] for row in first["runs"]] == ["deep/down/fast", "slow"]
    until(lambda: app.get("/api/runs").json()["pending"] == 0, "figures")
    row = app.get("/api/runs").json()["runs"][1]
    assert row["status"] == "finished"
    assert row["devices"] == ["1 x Test GPU"]
    assert row["readings"]["throughput.tokens_per_s"]["value"] == pytest.approx(100.0)
    assert row["readings"]["energy.joules_per_token"]["value"] == pytest.approx(3.0)
    assert row["readings"]["utilization.mfu_frac"]["missing"].startswith("the FLOPs")


def test_the_list_is_not_sent_again_while_it_is_the_same(app: TestClient) -> None:
    until(lambda: app.get("/api/runs").json()["pending"] == 0, "figures")
    answer = app.get("/api/runs")
    again = app.get("/api/runs", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304
    assert again.content == b""


def test_a_run_that_was_added_or_removed_is_seen(app: TestClient, root: Path) -> None:
    app.get("/api/runs")
    a_run(root / "third")
    until(lambda: "third" in ids(app), "a new run in the list")
    shutil.rmtree(root / "slow")
    until(lambda: "slow" not in ids(app), "a run that is gone leaves the list")


def test_tags_and_notes_are_those_of_erg_runs(app: TestClient, root: Path) -> None:
    tag(root / "slow", add=["keep"])
    annotate(root / "slow", "with the new driver")
    until(lambda: app.get(f"/api/run/{ids(app)['slow']}/row").json().get("notes_on_it"), "the note")
    row = app.get(f"/api/run/{ids(app)['slow']}/row").json()
    assert row["tags"] == ["keep"]
    assert row["notes_on_it"] == ["with the new driver"]
    (root / "slow" / "labels.json").write_text("{broken")
    until(lambda: not app.get(f"/api/run/{ids(app)['slow']}/row").json()["tags"], "no tag")
    assert app.get(f"/api/run/{ids(app)['slow']}/row").json()["status"] == "finished"


def test_a_damaged_run_is_listed_with_its_reason(app: TestClient, root: Path) -> None:
    (root / "slow" / "run.json").write_text("{not json")
    until(lambda: app.get("/api/runs").json()["pending"] == 0, "all read")
    until(
        lambda: app.get(f"/api/run/{ids(app)['slow']}/row").json().get("status") == "unreadable",
        "the damage",
    )
    row = app.get(f"/api/run/{ids(app)['slow']}/row").json()
    assert row["why"].startswith("slow/run.json: not JSON")


def test_a_run_has_the_figures_of_erg_report(app: TestClient) -> None:
    found = app.get(f"/api/run/{ids(app)['slow']}").json()
    assert found["readings"]["time.step_s"]["value"] == pytest.approx(1.0)
    assert found["readings"]["energy.run_j"]["value"] == pytest.approx(6000.0)
    assert found["shown"]["energy.run_j"]["text"] == "6 kJ"
    assert found["check"]["verdict"] == "not known"
    assert found["check"]["said"].startswith("not known: ")
    assert found["path"] == "slow"
    assert found["ahead"]["missing"].startswith("no total step or token count")


def test_readings_over_time_are_bounded_and_keep_a_spike(tmp_path: Path) -> None:
    long_run(tmp_path / "runs" / "long", 200_000, spike_at=123_456)
    with client(tmp_path / "runs") as app:
        run = ids(app)["long"]
        line = app.get(f"/api/run/{run}/series?columns=power_w&points=500").json()["lines"][0]
        assert len(line["t_s"]) <= 500
        assert line["readings"] == 200_000
        assert max(line["values"]) == 999.0
        assert line["t_s"][line["values"].index(999.0)] == pytest.approx(12_345.6)
        near = app.get(f"/api/run/{run}/series?columns=power_w&from=12345&to=12346&points=500")
        closer = near.json()["lines"][0]
        assert closer["t_s"] == pytest.approx(np.arange(12_345.0, 12_346.0, 0.1).tolist())


def long_run(path: Path, samples: int, *, spike_at: int) -> None:
    """A GPU that is read ten times a second and draws 300 W, but for one reading."""
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml", {"power_field": "instant"})
    header = {
        **writer_header("meter"),
        "clock": {"monotonic_ns": 0, "wall_ns": 1_800_000_000 * 10**9},
    }
    writer = Writer(make_run(path), header=header, devices=[gpu])
    watts = np.full(samples, 300.0)
    watts[spike_at] = 999.0
    columns = {
        "t_ns": (np.arange(samples) * 100_000_000).tolist(),
        "device": [gpu.id] * samples,
        "power_w": watts.tolist(),
    }
    writer.write_columns("samples", columns, stream="nvml")
    writer.mark(Mark(samples * 100_000_000, "closed"))
    writer.close()


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("columns=nonsense", "no column 'nonsense'"),
        ("points=5", "points=5 is not between 10 and 10000"),
        ("points=1e9", "is not between"),
        ("points=many", "points='many' is not a number"),
        ("from=nan", "from='nan' is not a number"),
        ("from=10&to=5", "from=10 is not before to=5"),
        ("columns=" + ",".join(["power_w"] * 13), "has 13 values; at most 12"),
    ],
)
def test_what_makes_no_sense_is_refused_with_what_would(
    app: TestClient, query: str, words: str
) -> None:
    answer = app.get(f"/api/run/{ids(app)['slow']}/series?{query}")
    assert answer.status_code == 400
    assert words in answer.json()["error"]


def test_a_comparison_is_that_of_erg_compare(app: TestClient) -> None:
    known = ids(app)
    address = f"/api/compare?ids={known['slow']},{known['deep/down/fast']}"
    found = app.get(address).json()
    assert found["baseline"] == "slow"
    assert [group["name"] for group in found["groups"]] == ["slow", "deep/down/fast"]
    rate = "throughput.tokens_per_s"
    assert found["groups"][1]["means"][rate]["value"] == pytest.approx(100.0)
    assert found["shown"]["cells"][0][rate] == "100"
    drawn = {one["id"] for one in found["charts"] if one["spec"]}
    assert "ratios" in drawn
    assert app.get("/api/compare?ids=").status_code == 400
    assert app.get("/api/compare?ids=000000000000").status_code == 404
    assert app.get(address + "&anyway=perhaps").status_code == 400


def test_the_cells_of_a_bench_are_told_apart_by_how_they_ended(tmp_path: Path) -> None:
    for number, (batch, status, rate) in enumerate(
        [("1", "ok", 100.0), ("2", "ok", 190.0), ("4", "oom", None), ("8", "ok", math.inf)]
    ):
        cell = tmp_path / "bench" / f"exp_{number}"
        cell.mkdir(parents=True)
        settings = {"per_device_train_batch_size": batch, "num_gpus": 1}
        said = {"train_tokens_per_second": rate, "train_runtime": 10.0} if rate else {}
        (cell / "status.json").write_text(
            json.dumps({"status": status, "reason": "" if rate else f"out of memory {HOSTILE}"})
        )
        (cell / "results.json").write_text(json.dumps({**settings, **said}))
    before = sorted(path.name for path in (tmp_path / "bench").rglob("*"))
    with client(tmp_path) as app:
        names = app.get("/api/benches").json()["benches"]
        assert [one["name"] for one in names] == ["bench"]
        found = app.get(f"/api/bench/{names[0]['id']}").json()
    assert found["axes"] == ["per_device_train_batch_size"]
    assert [group["status"] for group in found["groups"]] == ["ok", "ok", "oom", "ok"]
    assert [group["is_ok"] for group in found["groups"]] == [True, True, False, True]
    assert found["groups"][1]["figures"]["tokens_per_s"]["value"] == 190.0
    # As `erg bench report` marks it: what the Trainer told counts padding.
    assert found["groups"][1]["figures"]["tokens_per_s"]["text"] == "190*"
    assert found["groups"][2]["figures"]["tokens_per_s"] is None
    # No number to compute with, and a word to show.
    assert found["groups"][3]["figures"]["tokens_per_s"] == {
        "value": None,
        "text": "inf",
        "runs": 1,
        "impossible": None,
    }
    assert found["groups"][2]["reason"].startswith("out of memory")
    assert sorted(path.name for path in (tmp_path / "bench").rglob("*")) == before, "it wrote"


def test_a_ledger_is_a_table_and_what_is_broken_in_it_is_said(tmp_path: Path) -> None:
    with (tmp_path / "energy_results.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(
            ["backend", "tok_per_s", "tokens_processed", "wall_s", "energy_J", "window_s"]
        )
        rows.writerow([HOSTILE, "123.5", "1000", "8.1", "", "8.0"])
        rows.writerow(["cuda", "no number", "1000", "8.1", "5", "8.0"])
    with client(tmp_path) as app:
        listed = app.get("/api/ledgers").json()["ledgers"]
        assert [one["name"] for one in listed] == ["energy_results.csv"]
        found = app.get(f"/api/ledger/{listed[0]['id']}").json()
    assert len(found["rows"]) == 1
    assert found["rows"][0]["facts"]["backend"] == HOSTILE
    assert found["rows"][0]["readings"]["throughput.tokens_per_s"]["value"] == 123.5
    assert found["left_out"] == [
        "energy_results.csv line 3: tok_per_s is not a number: 'no number'"
    ]


def test_the_page_of_a_finished_run_is_its_report(app: TestClient, root: Path) -> None:
    run = ids(app)["slow"]
    until(lambda: app.get(f"/run/{run}/report").status_code == 200, "the report")
    page = app.get(f"/run/{run}")
    assert "Where it went" in page.text
    assert "How to cite" in page.text
    assert '<nav class="app"' in page.text
    assert "http-equiv" not in page.text
    policy = page.headers["content-security-policy"]
    assert re.search(r"script-src 'sha256-[^;]* 'self'", policy)
    assert "unsafe-eval" not in policy
    assert "script-src 'unsafe-inline'" not in policy


def test_of_a_long_run_the_page_is_there_before_its_report_and_then_is_the_report(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergmeter.views.serve.app_state._LONG_BYTES", 0)
    asked: list[str] = []
    ask = Pool.ask

    async def noted(self: Pool, name: str, *arguments: object, **more: Any) -> bytes:
        asked.append(name)
        return await ask(self, name, *arguments, **more)

    monkeypatch.setattr(Pool, "ask", noted)
    run = ids(app)["slow"]
    assert "reading the run" in app.get(f"/run/{run}").text
    assert app.get(f"/api/run/{run}/charts?only=steps").status_code == 200
    assert "report" not in asked  # which its page asks for when it has what comes first
    assert app.get(f"/run/{run}/report").status_code == 200
    assert "How to cite" in app.get(f"/run/{run}").text
    assert asked.count("report") == 1


def test_the_figures_of_one_run_do_not_wait_for_the_list(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergmeter.views.serve.app_state.RunListing.start", lambda _: None)
    with client(root) as app:
        run = ids(app)["slow"]
        row = app.get(f"/api/run/{run}/row").json()
        whole = app.get(f"/api/run/{run}").json()["readings"]
    assert row["is_pending"] is False
    assert row["readings"]["energy.joules_per_token"]["value"] == pytest.approx(3.0)
    for key, found in row["readings"].items():
        assert found.get("value") == whole[key].get("value"), key


def test_the_figures_of_one_run_are_those_of_its_files_now(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ergmeter.views.serve.app_state.RunListing.start", lambda _: None)
    monkeypatch.setattr("ergmeter.views.serve.folder._STAMP_AGE_S", 0.0)
    with client(root) as app:
        run = ids(app)["slow"]
        before = app.get(f"/api/run/{run}/row").json()["readings"]
        shutil.rmtree(root / "slow")
        twice = [Sample(i * 10**9, GPU.id, power_w=600.0, energy_j=600.0 * i) for i in range(21)]
        a_run(root / "slow", samples=twice)
        after = app.get(f"/api/run/{run}/row").json()["readings"]
    assert before["energy.joules_per_token"]["value"] == pytest.approx(3.0)
    assert after["energy.joules_per_token"]["value"] == pytest.approx(6.0)


def test_just_the_charts_that_are_asked_for_are_drawn(
    app: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "energy_line", None)  # whoever draws it fails
    run = ids(app)["slow"]
    found = app.get(f"/api/run/{run}/charts?only=steps,power").json()["charts"]
    assert [one["id"] for one in found] == ["power", "steps"]
    data = [layer.get("data", {}) for layer in found[0]["spec"]["layer"]]
    points = [one["v"] for part in data for one in part.get("values", ()) if "v" in one]
    assert set(points) == {300.0}


def test_scripts_are_sent_once_and_kept_for_good(app: TestClient) -> None:
    page = app.get("/").text
    for address in re.findall(r'"(/static/[^"]+)"', page):
        answer = app.get(address)
        assert answer.status_code == 200, address
        assert "immutable" in answer.headers["cache-control"]
        assert answer.headers["x-content-type-options"] == "nosniff"
    library = re.search(r'data-charts="([^"]+)"', page)
    assert library
    assert app.get(library[1]).content.decode() == vega()


def test_a_hostile_name_stands_in_no_page(tmp_path: Path) -> None:
    a_run(tmp_path / "runs" / "one", HOSTILE, marks=[Mark(5 * 10**9, HOSTILE, HOSTILE)])
    with client(tmp_path / "runs") as app:
        run = ids(app)["one"]
        for address in ("/", f"/run/{run}/report", f"/compare?ids={run},{run}", f"/run/{run}"):
            page = app.get(address).text
            assert "<img src=x" not in page
            assert "<script>alert" not in page


def test_every_address_of_the_description_is_there(app: TestClient) -> None:
    described = app.get("/api/openapi.json").json()
    assert described["openapi"] == "3.1.0"
    run = ids(app)["slow"]
    for path, what in described["paths"].items():
        if "event" in path or path == "/api/compare":
            continue
        answer = app.get(path.replace("{id}", run))
        assert answer.status_code == (404 if "bench/" in path or "ledger/" in path else 200), path
        if answer.status_code == 200:
            content = what["get"]["responses"]["200"]["content"]["application/json"]
            assert set(content["schema"]["required"]) <= answer.json().keys()


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("/nowhere", "There is nothing at this address"),
        ("/run/0123456789ab", "There is no run at this address"),
        ("/run/0123456789ab/report", "There is no run at this address"),
        ("/bench/0123456789ab", "There is no bench at this address"),
        ("/ledger/x", "There is no ledger at this address"),
    ],
)
def test_what_is_not_there_is_a_page_for_a_browser_and_json_for_a_program(
    app: TestClient, address: str, why: str
) -> None:
    page = app.get(address, headers=BROWSER)
    assert page.status_code == 404
    assert page.headers["content-type"].startswith("text/html")
    assert f'{why}. <a href="/">All runs</a>' in page.text
    assert app.get("/").text.partition("<main")[0].replace("Runs ·", "") == (
        page.text.partition("<main")[0]
        .replace("Nothing here ·", "")
        .replace('data-page="none"', 'data-page="runs"')
    )
    told = app.get(address)
    assert (told.status_code, told.json()) == (404, {"error": why})


@pytest.mark.parametrize("address", ["/api/nowhere", "/api/run/0123456789ab", "/api/run/x/series"])
def test_the_api_answers_in_json_whoever_asks(app: TestClient, address: str) -> None:
    answer = app.get(address, headers=BROWSER)
    assert answer.status_code == 404
    assert "error" in answer.json()


def test_a_report_that_can_not_be_made_is_a_page_that_says_why(tmp_path: Path) -> None:
    run = a_run(tmp_path / "runs" / "one")
    (run / "run.json").write_text("{")
    with client(tmp_path / "runs") as app:
        (id,) = ids(app).values()
        page = app.get(f"/run/{id}/report", headers=BROWSER)
    assert page.status_code == 422
    assert "Can't be read" in page.text


def test_every_refusal_is_described() -> None:
    """What the guard and the API answer with, as their code has it."""
    for path, said in api.openapi_document()["paths"].items():
        codes = set(said["get"]["responses"])
        wanted = {"200", "400", "401", "403", "404", "405", "413", "414", "421", "422", "503"}
        assert codes == wanted, path


def test_so_many_runs_as_the_description_says_are_watched_and_compared() -> None:
    for path, most in (("/api/events", api.MOST_WATCHED), ("/api/compare", api.MOST_COMPARED)):
        (said,) = [
            p
            for p in api.openapi_document()["paths"][path]["get"]["parameters"]
            if p["name"] == "ids"
        ]
        ids_ = [f"{number:012x}" for number in range(most + 1)]
        assert re.search(said["schema"]["pattern"], ",".join(ids_[:most]))
        assert not re.search(said["schema"]["pattern"], ",".join(ids_))
    worker = pages.asset("watch.js").body.decode()
    assert f"const MOST = {api.MOST_WATCHED};" in worker

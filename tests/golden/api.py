"""Cases that are no command: the pages and JSON of `erg serve`, the Python API, reasons."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from tests.golden import ours, text

Call = Callable[[Path], str]
_TRIES = 1200


# -- erg serve ------------------------------------------------------------------------------------


def _answer(address: str, answer: Any) -> str:
    kind = answer.headers.get("content-type", "")
    head = f"GET {address}\n[{answer.status_code} {kind}]\n"
    if "json" in kind:
        return (
            head + json.dumps(_without_charts(answer.json()), indent=1, ensure_ascii=False) + "\n"
        )
    return head + (text.html_text(answer.text) if "html" in kind else answer.text)


def _without_charts(value: Any) -> Any:
    """Charts as one line each."""
    if isinstance(value, dict):
        return {
            key: text.charts_text(inner) if key == "charts" and isinstance(inner, list)
            else _without_charts(inner)
            for key, inner in value.items()
        }  # fmt: skip
    return [_without_charts(inner) for inner in value] if isinstance(value, list) else value


def _settled(app: Any) -> dict[str, str]:
    """The ids of all runs by name, as soon as every run was read."""
    for _ in range(_TRIES):
        listed = app.get("/api/runs").json()
        if listed["pending"] == 0:
            return {row["name"]: row["id"] for row in listed["runs"]}
        time.sleep(0.05)
    raise AssertionError("the runs were not read in a minute")


def _pages(addresses: Callable[[Any, dict[str, str]], list[str]], folder: Path) -> str:
    with ours.web_client(folder) as app:
        known = _settled(app)
        return "\n".join(_answer(one, app.get(one)) for one in addresses(app, known))


def _lists(app: Any, known: dict[str, str]) -> list[str]:
    return [
        "/", "/compare", "/benches", "/ledgers", "/api/openapi.json", "/api/runs", "/api/benches",
        "/api/ledgers", "/nothing", "/api/nothing", "/run/000000000000", "/api/run/000000000000",
        "/api/run/zzz", "/static/nothing", f"/run/{known['runs/broken']}",
    ]  # fmt: skip


def _runs(app: Any, known: dict[str, str]) -> list[str]:
    addresses = []
    for name in ("runs/plain", "runs/cutoff", "runs/broken"):
        base = f"/api/run/{known[name]}"
        addresses += [base, f"{base}/row", f"{base}/charts"]
    return addresses


def _series(app: Any, known: dict[str, str]) -> list[str]:
    base = f"/api/run/{known['runs/plain']}/series"
    queries = (
        "columns=power_w&points=20", "columns=power_w,memory_bytes&points=10&from=10&to=20",
        "columns=nonsense", "points=5", "points=many", "from=10&to=5", "from=nan",
    )  # fmt: skip
    return [f"{base}?{query}" for query in queries]


def _report_pages(app: Any, known: dict[str, str]) -> list[str]:
    return [f"/run/{known[name]}/report" for name in ("runs/phases", "runs/served", "runs/broken")]


def _comparison(app: Any, known: dict[str, str]) -> list[str]:
    pair = f"{known['runs/plain']},{known['runs/phases']}"
    return [
        f"/api/compare?ids={pair}", f"/api/compare?ids={pair}&anyway=1", "/api/compare?ids=",
        "/api/compare?ids=000000000000", f"/api/compare?ids={pair}&anyway=perhaps",
    ]  # fmt: skip


def _tables(app: Any, known: dict[str, str]) -> list[str]:
    found = []
    for kind in ("bench", "ledger"):
        plural = {"bench": "benches", "ledger": "ledgers"}[kind]
        for one in app.get(f"/api/{plural}").json()[plural]:
            if one["name"].endswith(("first.csv", "again.csv")):
                continue  # long, and as `erg compare` shows them
            found += [f"/api/{kind}/{one['id']}", f"/{kind}/{one['id']}"]
    return found


# -- the Python API -------------------------------------------------------------------------------


def _names(folder: Path) -> str:
    """The public names, with the signatures of the functions and classes."""
    lines = []
    for name in sorted(ours.ergmeter.__all__):
        thing = getattr(ours.ergmeter, name)
        if name == "__version__":
            continue
        if inspect.isclass(thing) or inspect.isfunction(thing):
            is_error = inspect.isclass(thing) and issubclass(thing, Exception)
            lines.append(f"{name}{'' if is_error else inspect.signature(thing)}")
            lines += [f"    {word}" for word in (inspect.getdoc(thing) or "").splitlines()]
        if inspect.isclass(thing):
            members = (one for one in sorted(vars(thing)) if not one.startswith("_"))
            lines += [f"    .{one}{_signature(thing, one)}" for one in members]
    return "\n".join(lines) + "\n"


def _signature(owner: type, name: str) -> str:
    member = inspect.getattr_static(owner, name)
    plain = getattr(member, "__func__", member)
    return str(inspect.signature(plain)) if inspect.isfunction(plain) else ""


def _summary(run: str, folder: Path) -> str:
    """A summary through the public names: as `repr` and `str` show its readings."""
    opened = ours.Run.open(folder / run)
    summary = ours.summarize(opened)
    lines = [f"status {summary.status}", f"window {summary.window!r}"]
    lines += [f"{key} = {reading!r}" for key, reading in summary.readings.items()]
    for device, readings in summary.devices.items():
        lines += [f"{device}: {key} = {reading!r}" for key, reading in readings.items()]
    lines += [f"note: {note}" for note in summary.notes]
    other = ours.summarize(opened, ours.Settings(warmup_steps=10, window="whole"))
    lines += [f"whole: {key} = {reading}" for key, reading in other.readings.items()]
    lines += [repr(ours.Settings()), repr(ours.Window(0, 5)), repr(ours.Missing("why"))]
    return "\n".join(lines) + "\n"


def _refusals(folder: Path) -> str:
    """What the public names refuse, and with which error."""
    calls: dict[str, Callable[[], object]] = {
        "Window(5, 5)": lambda: ours.Window(5, 5),
        "Settings(warmup_steps=-1)": lambda: ours.Settings(warmup_steps=-1),
        "Settings(window='x')": lambda: ours.Settings(window="x"),
        "Settings(dtype='x')": lambda: ours.Settings(dtype="x"),
        "Settings(pue=0.5)": lambda: ours.Settings(pue=0.5),
        "Run.open('nowhere')": lambda: ours.Run.open(Path("nowhere")),
        "Meter(probes=['x'])": lambda: ours.Meter(Path("a"), probes=["x"]),
        "Meter(warmup_steps=-1)": lambda: ours.Meter(Path("b"), warmup_steps=-1),
        "Meter(alerts=['x'])": lambda: ours.Meter(Path("c"), alerts=["x"]),
        "ergmeter.nothing": lambda: ours.ergmeter.nothing,
    }
    lines = []
    for label, call in calls.items():
        try:
            lines.append(f"{label}: no error: {type(call()).__name__}")
        except Exception as error:  # noqa: BLE001  the case is which error it is
            lines.append(f"{label}: {type(error).__name__}: {error}")
    return "\n".join(lines) + "\n"


def _plugins(folder: Path) -> str:
    """The names of plugins by group. Where they live is not part of it."""
    groups = ("probes", "importers", "sinks", "flops", "metrics", "launchers")
    names = {g: sorted(one.name for one in entry_points(group=f"ergmeter.{g}")) for g in groups}
    return "\n".join(f"{group}: {' '.join(found)}" for group, found in names.items()) + "\n"


# -- reasons --------------------------------------------------------------------------------------


def _reasons(name: str, folder: Path) -> str:
    """Runs in which a metric is absent or carries a caution: all that is said of them."""
    parts = []
    for number, case in enumerate(ours.reason_cases()[name]):
        place = folder / str(number)
        place.mkdir()
        parts.append(f"# {case.fact}\n" + "".join(f"{one}\n" for one in case.texts(place)))
        runs = sorted(path.parent for path in place.rglob("run.json"))
        parts += [_brief(run) for run in runs]
    return "\n".join(parts)


def _brief(run: Path) -> str:
    """Every value of a run in a line, and its notes."""
    summary = ours.summarize(ours.Run.open(run))
    values = [
        f"{key}={one.value:.6g}" for key, one in summary.readings.items()
        if isinstance(one, ours.Reading)
    ]  # fmt: skip
    lines = [f"{summary.status}: {' '.join(values)}", *(f"note: {one}" for one in summary.notes)]
    return "".join(f"  {line}\n" for line in lines)


_FOLDER = ("runs", "bench-ref", "ledgers")
CALLS: dict[str, tuple[Call, tuple[str, ...]]] = {
    "serve-lists": (partial(_pages, _lists), _FOLDER),
    "serve-runs": (partial(_pages, _runs), _FOLDER),
    "serve-series": (partial(_pages, _series), _FOLDER),
    "serve-reports": (partial(_pages, _report_pages), _FOLDER),
    "serve-compare": (partial(_pages, _comparison), _FOLDER),
    "serve-tables": (partial(_pages, _tables), _FOLDER),
    "api-names": (_names, ()),
    "api-refusals": (_refusals, ()),
    "api-plugins": (_plugins, ()),
    **{f"api-summary-{run}": (partial(_summary, run), (run,)) for run in ("plain", "cpu")},
    **{f"reasons-{name}": (partial(_reasons, name), ()) for name in ours.reason_cases()},
}

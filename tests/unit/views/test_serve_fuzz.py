"""The API against made-up questions: what it answers is what its description says, and never 500.

Streams are left out, as they have no end; `test_serve_kept` and the browser have them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from ergmeter.views.serve import api
from ergmeter.views.serve.app import web_app
from ergmeter.views.serve.folder import Folder, Kind
from ergmeter.views.serve.guard import LOOPBACK, Access
from ergmeter.views.serve.pool import Pool
from tests.unit.views.serving import a_run, client, ids

schemathesis = pytest.importorskip("schemathesis")

KINDS: tuple[Kind, ...] = ("run", "bench", "ledger")
QUESTIONS = [path for path in api.openapi_document()["paths"] if "events" not in path]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The app under the name that the fuzzer's client asks for."""
    root = tmp_path_factory.mktemp("fuzz")
    a_run(root / "one")
    (root / "energy_results.csv").write_text("tok_per_s,tokens_processed,wall_s\n1,2,3\n")
    (root / "bench" / "exp_0").mkdir(parents=True)
    access = Access(frozenset({*LOOPBACK, "testserver"}))
    pool = Pool(lambda: ThreadPoolExecutor(1))
    folder = Folder(root)
    made = web_app(folder, access, pool=pool)
    # Ids that there are, or nearly every answer would be 404.
    there = [p.id for kind in KINDS for p in folder.items(kind)]
    ids_ = {"type": "string", "enum": [*there, "0" * 12]}
    with pytest.MonkeyPatch.context() as patch, TestClient(made):
        patch.setitem(api._ID_PARAMETER, "schema", ids_)
        patch.setitem(api._IDS, "schema", ids_)
        yield made


@pytest.mark.parametrize("path", QUESTIONS)
def test_an_answer_is_what_the_description_says(app: Any, path: str) -> None:
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    schema = schemathesis.openapi.from_asgi("/api/openapi.json", app)

    @given(case=schema[path]["GET"].as_strategy())
    @settings(max_examples=15, suppress_health_check=list(HealthCheck))
    def ask(case: Any) -> None:
        # What a description can't say (from before to, columns that runs have) is refused with 400.
        case.call_and_validate(excluded_checks=[positive_data_acceptance])

    ask()


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(query=st.text(max_size=60), column=st.text(max_size=20))
def test_no_question_makes_it_fail(query: str, column: str, tmp_path_factory: Any) -> None:
    root = tmp_path_factory.getbasetemp() / "asked"
    if not root.exists():
        a_run(root / "one")
    app = _client(root)
    run = ids(app)["one"]
    for address in (f"/api/run/{run}/series", "/api/compare", f"/api/run/{run}/charts"):
        words = {"columns": column, "ids": query, "from": query, "points": query, "only": column}
        assert app.get(address, params=words).status_code in (200, 400, 404), (address, words)


_clients: dict[Path, TestClient] = {}


def _client(root: Path) -> TestClient:
    return _clients.setdefault(root, client(root))

"""A directory with a bit of everything, and the app over it, called in this process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from ergmeter.records import Sample
from ergmeter.views.serve.app import web_app
from ergmeter.views.serve.folder import Folder
from ergmeter.views.serve.guard import Access
from ergmeter.views.serve.pool import Pool
from tests.runs import GPU, add_writer, even_steps, make_run

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def a_run(path: Path, name: str = "test", *, steps: int = 20, **more: Any) -> Path:
    """Steps of a second with 100 tokens each, on a GPU that draws 300 W: 3 J a token."""
    run = make_run(path, name)
    samples = [
        Sample(i * 10**9, GPU.id, power_w=300.0, energy_j=300.0 * i) for i in range(steps + 1)
    ]
    given = {"steps": even_steps(steps, tokens_real=100), "samples": samples, "devices": [GPU]}
    add_writer(run, settings={"warmup_steps": 0}, **{**given, **more})
    return run


def client(root: Path, access: Access | None = None) -> TestClient:
    """The app over a directory; `with` starts what is done behind the pages."""
    pool = Pool(lambda: ThreadPoolExecutor(1))
    return TestClient(web_app(Folder(root), access, pool=pool), base_url="http://127.0.0.1:8000")


def ids(app: TestClient) -> dict[str, str]:
    """The runs by name."""
    return {row["name"]: row["id"] for row in app.get("/api/runs").json()["runs"]}


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for what is done behind the pages."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError(f"waited in vain: {what}")

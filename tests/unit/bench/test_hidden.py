"""Keys in a scenario's environment: they reach its cells, and are in no file of the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ergmeter.bench import hidden, launching
from ergmeter.bench.plan import plan
from ergmeter.errors import UsageError

Erg = Callable[..., tuple[int, str, str]]
PLAIN = {"TOKENIZERS_PARALLELISM": "false", "MODE": "fast"}
KEYS = {
    "HF_TOKEN": "hf_Zq7x{seed}",
    "MY_API_KEY": "k-4711",
    "DB_PASSWORD": "pa55 w0rd",
    "CLIENT_SECRET": "s3cr3t",
    "HTTPS_PROXY": "http://me:open5esame@proxy:3128",
}
# Writes what it was given where the test looks, and not into the results.
PROGRAM = """
import json, os, sys
names = sys.argv[1].split(",")
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps({name: os.environ.get(name) for name in names}) + "\\n")
sys.exit(int(os.environ.get("FAIL", "0")))
"""


@pytest.fixture(autouse=True)
def environment(tmp_path: Path) -> Iterator[None]:
    """Without the keys of whoever runs the tests; a driver hands over in it, so put back after."""
    before = dict(os.environ)
    for name in KEYS:
        os.environ.pop(name, None)
    os.environ["SEEN"] = str(tmp_path / "seen")
    yield
    os.environ.clear()
    os.environ.update(before)


def scenarios(folder: Path, **keys: object) -> Path:
    (folder / "program.py").write_text(PROGRAM)
    names = ",".join((*KEYS, *PLAIN))
    scenario = {
        "name": "mine",
        "command": f"{{python}} {folder}/program.py {names} {{run}}",
        "arguments": {},
        "environment": {**KEYS, **PLAIN},
        **keys,
    }
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [scenario]}))
    return path


def seen(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "seen").read_text().splitlines()]


def with_keys(folder: Path) -> list[str]:
    """The files below that hold any key."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file():
            text = path.read_bytes()
            words = [
                *(value for name, value in KEYS.items() if name != "HTTPS_PROXY"),
                "open5esame",
            ]
            found += [path.name for word in words if word.encode() in text]
    return found


def test_keys_reach_the_cell_and_no_file(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "results"
    code, printed, said = erg(
        *("bench", "run", scenarios(tmp_path), "--out", out, "--cool-down", 0)
    )
    assert code == 0, said
    assert seen(tmp_path) == [{**KEYS, **PLAIN}]
    assert with_keys(out) == []
    assert "hf_Zq7x" not in printed + said
    kept = json.loads((out / "plan.json").read_text())["cells"][0]["environment"]
    assert kept == {**dict.fromkeys(KEYS, "(hidden)"), **PLAIN}
    told = json.loads((out / "exp_0" / "environment.json").read_text())
    assert told["MODE"] == "fast"
    assert not [name for name in told if name.startswith(hidden.PREFIX)]


def test_a_resumed_bench_takes_keys_from_the_file_again(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "results"
    words = ("bench", "run", scenarios(tmp_path), "--out", out, "--cool-down", 0)
    os.environ["FAIL"] = "1"
    assert erg(*words)[0] == 1
    del os.environ["FAIL"]
    for name in [name for name in os.environ if name.startswith(hidden.PREFIX)]:
        del os.environ[name]
    # A key that was changed meanwhile is no other cell.
    scenarios(tmp_path, environment={**KEYS, **PLAIN, "HF_TOKEN": "hf_new"})
    code, _, said = erg(*words, "--resume", "--rerun", "error")
    assert code == 0, said
    assert [one["HF_TOKEN"] for one in seen(tmp_path)] == [KEYS["HF_TOKEN"], "hf_new"]
    assert with_keys(out) == []


def test_a_key_is_of_its_scenario_alone(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    both = [
        {"name": name, "command": "true {run}", "arguments": {}, "environment": environment}
        for name, environment in {"a": {"A_KEY": "ab1"}, "b": {"A_KEY": "ab2"}, "c": {}}.items()
    ]
    path.write_text(yaml.safe_dump({"scenarios": both}))
    made = plan(path)
    hidden.hand_over(made.keys)
    starts = [launching.start(cell, tmp_path, has_gpus=False) for cell in made.cells]
    assert [how.environment.get("A_KEY") for how in starts] == ["ab1", "ab2", None]
    assert not [n for how in starts for n in how.environment if n.startswith(hidden.PREFIX)]
    assert "ab1" not in json.dumps(made.to_json()) + repr(made)


def test_a_key_that_nobody_hands_over_is_named(tmp_path: Path) -> None:
    (cell,) = plan(scenarios(tmp_path, environment={"HF_TOKEN": "x"})).cells
    with pytest.raises(UsageError, match="set HF_TOKEN where cells start"):
        launching.start(cell, tmp_path, has_gpus=False)
    os.environ["HF_TOKEN"] = "of the machine"  # a node that has one of its own
    assert launching.start(cell, tmp_path, has_gpus=False).own == {"HF_TOKEN": "of the machine"}


@pytest.mark.parametrize(
    ("name", "value", "is_key"),
    [
        ("HF_TOKEN", "x", True),
        ("WANDB_API_KEY", "x", True),
        ("apikey", "x", True),
        ("AWS_SECRET_ACCESS_KEY", "x", True),
        ("PGPASSWORD", "x", True),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("CUDA_VISIBLE_DEVICES", "0", False),
        ("HTTPS_PROXY", "http://me:pw@proxy", True),
        ("HTTPS_PROXY", "http://proxy:3128/a@b", False),
    ],
)
def test_what_is_a_key(name: str, value: str, *, is_key: bool) -> None:
    assert hidden.is_key(name, value) == is_key

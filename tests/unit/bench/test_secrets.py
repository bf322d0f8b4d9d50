"""Keys in a scenario's environment: they reach its cells, and are in no file of the results."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ergmeter.bench.execute import launching
from ergmeter.bench.execute import launching as secrets
from ergmeter.bench.plan.plan import plan
from ergmeter.bench.plan.scenarios import template
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
    assert not [name for name in told if name.startswith(secrets.HIDDEN_PREFIX)]


def test_a_resumed_bench_takes_keys_from_the_file_again(erg: Erg, tmp_path: Path) -> None:
    out = tmp_path / "results"
    words = ("bench", "run", scenarios(tmp_path), "--out", out, "--cool-down", 0)
    os.environ["FAIL"] = "1"
    assert erg(*words)[0] == 1
    del os.environ["FAIL"]
    for name in [name for name in os.environ if name.startswith(secrets.HIDDEN_PREFIX)]:
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
    os.environ.update(made.keys)
    starts = [launching.start(cell, tmp_path, has_gpus=False) for cell in made.cells]
    assert [how.environment.get("A_KEY") for how in starts] == ["ab1", "ab2", None]
    assert not [n for how in starts for n in how.environment if n.startswith(secrets.HIDDEN_PREFIX)]
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
        ("WANDB_AUTH", "x", True),
        ("HTTP_AUTHORIZATION", "Basic x", True),
        ("AWS_SESSION", "x", True),
        ("DB_PASSWORD", "4711", True),
        ("GIT_AUTHOR_NAME", "me", False),
        ("MAX_TOKENS", "4096", False),
        ("BATCH_TOKENS", "{b}", False),
        ("NUM_KEY_VALUE_HEADS", "8", False),
        ("TOKENIZERS_PARALLELISM", "false", False),
        ("CUDA_VISIBLE_DEVICES", "0", False),
        ("HTTPS_PROXY", "http://me:pw@proxy", True),
        ("HTTPS_PROXY", "http://proxy:3128/a@b", False),
    ],
)
def test_what_is_a_key(name: str, value: str, *, is_key: bool) -> None:
    assert secrets.is_secret(name, value) == is_key


def test_a_number_with_the_name_of_a_key_is_a_setting(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    both = [
        {
            "name": name, "command": "true {b} {run}", "arguments": {"b": 7},
            "environment": {"MAX_TOKENS": tokens, "BATCH_TOKENS": "{b}"},
        }
        for name, tokens in {"short": "128", "long": "256"}.items()
    ]  # fmt: skip
    path.write_text(yaml.safe_dump({"scenarios": both}))
    made = plan(path)
    assert [cell.environment for cell in made.cells] == [
        {"MAX_TOKENS": "128", "BATCH_TOKENS": "7"},
        {"MAX_TOKENS": "256", "BATCH_TOKENS": "7"},
    ]
    assert len({cell.id for cell in made.cells}) == 2
    assert made.keys == {}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"arguments": {"hub_token": "hf_Zq7x"}}, "hub_token"),
        ({"arguments": {}, "axes": {"api_key": ["k-4711"]}}, "api_key"),
        ({"arguments": {}, "include": [{"hub_token": "hf_Zq7x"}]}, "hub_token"),
        (
            {
                "arguments": {},
                "data_processing": {
                    "dataset_name": "d",
                    "additional_dataset_kwargs": {"token": "hf_Zq7x"},
                },
            },
            "data_processing.additional_dataset_kwargs.token",
        ),
    ],
)
def test_a_key_among_settings_is_refused_and_not_repeated(
    tmp_path: Path, keys: dict[str, object], named: str
) -> None:
    command = "true {arguments} {training_data_path} {run}"
    with pytest.raises(UsageError) as refused:
        plan(scenarios(tmp_path, command=command, **keys))
    assert f"{named} is a key, and settings are written down" in str(refused.value)
    assert "hf_Zq7x" not in str(refused.value)
    assert "k-4711" not in str(refused.value)


def test_arguments_that_only_sound_like_keys_are_taken(tmp_path: Path) -> None:
    arguments = {
        "pad_token": "<pad>", "max_tokens": 128, "include_num_input_tokens_seen": "all",
        "label_key": "answer", "hub_token": None, "use_auth_token": True,
    }  # fmt: skip
    (cell,) = plan(scenarios(tmp_path, command="true {arguments} {run}", arguments=arguments)).cells
    assert cell.settings["pad_token"] == "<pad>"


def test_the_script_of_a_cell_sets_no_key_to_stars(tmp_path: Path) -> None:
    made = plan(scenarios(tmp_path))
    os.environ.update(made.keys)
    how = launching.start(made.cells[0], tmp_path, has_gpus=False)
    lines = launching.script(how, where=tmp_path).splitlines()
    assert "export TOKENIZERS_PARALLELISM=false" in lines
    assert "# set HF_TOKEN yourself: it is a key, which is not written down" in lines
    assert "# set HTTPS_PROXY yourself: it is a key, which is not written down" in lines
    assert not [line for line in lines if "***" in line]
    assert launching.launch_environment(how)["HTTPS_PROXY"] == "http://***@proxy:3128"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train.py --token abc {run}", ["--token ..."]),
        ("train.py --hub-token=abc {run}", ["--hub-token=..."]),
        ("env HF_TOKEN=abc train.py {run}", ["HF_TOKEN=..."]),
        ("login.py hf_AbCdEfGh1jKlMnOpQr {run}", ["hf_..."]),
        ("a.py sk-proj-Ab1_cdEfGhIjKlMnOpQrSt2 sk-0123456789abcdef {run}", ["sk-...", "sk-..."]),
        ("curl http://me:word@host/{run}", ["an address with a password"]),
        ("sh -c 'WANDB_API_KEY=abc a.py' {run}", ["WANDB_API_KEY=..."]),
        ("sh -c 'train.py --password x' {run}", ["--password ..."]),
        ("bash -c 'train.py --token  abc' {run}", ["--token ..."]),
        ("train.py --api-key=-Abc123 {run}", ["--api-key=..."]),
        # Settings, names of settings, and what is put in elsewhere.
        ("train.py --pad_token x --max-tokens 512 --token {t} --hf_token $HF_TOKEN {run}", []),
        ("train.py --use_auth_token --model hf_models/llama MAX_TOKENS=4096 {run}", []),
        ("train.py --model sk-learn-model-2024-abcdef --run sk-llama_3_8b-bench_run_12 {run}", []),
        ("{python} -m ergmeter train --config key.yaml --token-type x {run}", []),
    ],
)  # fmt: skip
def test_what_looks_like_a_key_in_a_command(command: str, said: list[str]) -> None:
    assert list(secrets.secrets_in_command(template(command).words)) == said


def test_a_plan_warns_of_a_key_in_a_command_and_does_not_repeat_it(
    erg: Erg, tmp_path: Path
) -> None:
    path = scenarios(tmp_path, command="true --token s3same {run}")
    code, _, said = erg("bench", "plan", str(path))
    assert code == 0
    assert said.splitlines() == [
        "scenario 'mine': --token ... in its command looks like a key, and commands are written"
        " down in the plan: give it as a variable under `environment`"
    ]
    assert erg("bench", "plan", str(scenarios(tmp_path)))[2] == ""

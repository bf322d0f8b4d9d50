"""Plans: ids that stay, repeats, what is kept of them, how long they take; and the data stage."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from ergmeter.bench.execute.driver import estimate_duration, known_durations
from ergmeter.bench.plan import data as datastage
from ergmeter.bench.plan.cells import BenchPlan
from ergmeter.bench.plan.plan import plan
from ergmeter.errors import FormatError, UsageError
from ergmeter.views.bench import plan_document
from ergmeter.views.render.terminal import show

SCENARIOS = Path(__file__).parents[3] / "scenarios" / "scenarios.yaml"
TEXT = "### Instruction:\n{0}\n\n### Response:"


def file(folder: Path, **keys: Any) -> Path:
    scenario = {"name": "mine", "command": "run {x}", "arguments": {}, "axes": {"x": [1, 2]}}
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [{**scenario, **keys}]}))
    return path


def test_ids_are_of_what_runs_and_not_of_its_place(tmp_path: Path) -> None:
    few = plan(file(tmp_path)).cells
    many = plan(file(tmp_path, axes={"x": [0, 2, 1]})).cells
    assert {cell.settings["x"]: cell.id for cell in few}.items() <= {
        cell.settings["x"]: cell.id for cell in many
    }.items()
    assert len({cell.id for cell in many}) == 3
    assert all(len(cell.id) == 12 and int(cell.id, 16) >= 0 for cell in many)
    other = plan(file(tmp_path, command="walk {x}")).cells
    assert not {cell.id for cell in few} & {cell.id for cell in other}
    elsewhere = plan(file(tmp_path, environment={"A": "1"})).cells
    assert not {cell.group for cell in few} & {cell.group for cell in elsewhere}


def test_an_id_is_also_of_the_files_that_a_cell_is_given(tmp_path: Path) -> None:
    def ids(bits: int) -> set[str]:
        keys = {
            "command": "erg train",
            "framework_config": ["few"],
            "arguments": {"model_name_or_path": "builtin:tiny", "max_steps": 2},
            "axes": {},
        }
        path = file(tmp_path, **keys)
        whole = yaml.safe_load(path.read_text())
        whole["framework_configs"] = {"few": {"backend": "bnb", "bits": bits}}
        path.write_text(yaml.safe_dump(whole))
        one: dict[str, Any] = {
            "num_gpus": [1],
            "effective_batch_size": [4],
            "packing": [False],
        }
        cells = plan(path, repeats=2, max_seq_len=[128], **one).cells
        assert len({cell.group for cell in cells}) == 1
        return {cell.id for cell in cells}

    assert len(ids(4)) == 2
    assert not ids(4) & ids(8)


@pytest.mark.parametrize("wrong", [{"A": None}, {"A=B": "1"}, {"x;y": "1"}])
def test_variables_that_are_none_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="environment takes NAME: text"):
        plan(file(tmp_path, environment=wrong))


def test_repeats_share_a_group_and_come_after_all_first_ones(tmp_path: Path) -> None:
    once = plan(file(tmp_path)).cells
    cells = plan(file(tmp_path), repeats=3).cells
    assert [cell.repeat for cell in cells] == [1, 1, 2, 2, 3, 3]
    assert [cell.id for cell in cells[:2]] == [cell.id for cell in once]
    assert len({cell.id for cell in cells}) == 6
    assert [cell.group for cell in cells[:2]] == [cell.group for cell in cells[4:]]
    assert len({cell.group for cell in cells}) == 2


def test_seeds_go_up_with_the_repeat_alike_in_every_configuration() -> None:
    cells = plan(SCENARIOS, repeats=2).cells
    seeds = [(cell.repeat, yaml.safe_load(cell.files["train.yaml"])["seed"]) for cell in cells]
    assert set(seeds) == {(1, 42), (2, 43)}
    assert cells[0].filled(Path("/r/exp_0")).files != cells[4].filled(Path("/r/exp_0")).files


def test_a_plan_read_again_is_the_same(tmp_path: Path) -> None:
    made = plan(SCENARIOS, repeats=2, num_gpus=[1, 2])
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(made.to_json()))
    again = BenchPlan.read(path)
    assert again == made
    assert [cell.group for cell in again.cells] == [cell.group for cell in made.cells]


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"version": 99, "cells": [], "source": ""}'])
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(FormatError):
        BenchPlan.read(path)
    with pytest.raises(FormatError, match="no plan was made here"):
        BenchPlan.read(tmp_path / "none.json")


def test_the_representative_set_is_what_it_says() -> None:
    made = plan(SCENARIOS)
    # 1 model x 2 frameworks x 2 batches; the slow scenario is left out.
    assert [
        (cell.settings["framework_config"], cell.settings["per_device_train_batch_size"])
        for cell in made.cells
    ] == [("none", 4), ("none", 8), ("bnb", 4), ("bnb", 8)]
    assert made.settings["slow"] == ["full"]
    assert [cell.expects[0].value for cell in made.cells] == ["lora", "lora", "qlora", "qlora"]


def test_what_the_check_finds_stops_the_plan(tmp_path: Path) -> None:
    seen = []

    def check(text: str) -> str | None:
        seen.append(yaml.safe_load(text)["tuning"]["backend"])
        return "not today" if seen[-1] == "bnb" else None

    with pytest.raises(UsageError, match="scenario 'lora': not today"):
        plan(SCENARIOS, repeats=5, check=check)
    assert seen == ["torch", "torch", "bnb", "bnb"]  # once a configuration


def test_time_is_told_by_what_ran_before(tmp_path: Path) -> None:
    made = plan(file(tmp_path, axes={"x": [1, 2, 3]}, constraints=["x < 3"]), repeats=2)
    first = made.cells[0]
    for number, (status, ended) in enumerate([("ok", "00:00:10"), ("ok", "00:00:30"), ("oom", "")]):
        folder = tmp_path / "results" / f"exp_{number}"
        folder.mkdir(parents=True)
        (folder / "cell.json").write_text(json.dumps(first.to_json()))
        attempt = {"started": "2026-01-01T00:00:00", "ended": f"2026-01-01T{ended}"}
        (folder / "status.json").write_text(json.dumps({"status": status, "attempts": [attempt]}))
    told = known_durations(tmp_path / "results")
    assert told == {first.group: 20.0, first.scenario: 20.0}
    all_of_it = estimate_duration(made, told)
    # x=1 by its own runs, x=2 by the scenario's, x=3 not at all; each twice.
    assert (all_of_it.measured, all_of_it.alike, all_of_it.skipped) == (2, 2, 2)
    assert all_of_it.total_s == 80.0
    assert estimate_duration(made, seconds_a_cell=7).total_s == 28.0
    assert estimate_duration(made).unknown == 4
    assert estimate_duration(made, {}).total_s == 0.0


def printed(made: BenchPlan, **options: Any) -> str:
    out = io.StringIO()
    document = plan_document(made, estimate_duration(made), **options)
    show(document, Console(file=out, width=100))
    return out.getvalue()


def test_a_plan_shows_its_cells_reasons_and_commands(tmp_path: Path) -> None:
    made = plan(file(tmp_path, constraints=[{"require": "x < 2", "reason": "too much"}]))
    text = printed(made)
    assert "x=1" in text
    assert "skipped because" in text
    assert "x=2       too much" in text
    assert "run 1" in text
    assert "time: unknown" in text
    assert "run 2" in printed(made, every=True)
    told = plan_document(made, estimate_duration(made, seconds_a_cell=3)).data
    assert told["estimate"]["total_s"] == 3.0
    assert json.loads(json.dumps(told))["cells"][1]["skip"] == "too much"


def test_a_plan_shows_what_all_cells_have_and_all_of_each(tmp_path: Path) -> None:
    one = printed(plan(file(tmp_path, axes={"x": [5]})))
    assert "in it: num_gpus=1, x=5" in one
    two = plan(file(tmp_path, axes={"x": [5, 6]}))
    assert "in all: num_gpus=1\n" in printed(two)
    lines = printed(two, every=True).splitlines()
    title = lines.index("exp_1: mine, repeat 1")
    assert lines[title + 1 : title + 3] == ["num_gpus=1, x=6", "run 6"]


def test_a_plan_of_nothing_but_skipped_cells_says_so(tmp_path: Path) -> None:
    text = printed(plan(file(tmp_path, constraints=[{"require": "x > 9", "reason": "too few"}])))
    assert "nothing would run: every cell is skipped" in text
    assert "the command of" not in text


@pytest.mark.parametrize(("keys", "shown_as"), [({}, "60 s (default)"), ({"warmup": "5s"}, " 5 s")])
def test_a_plan_shows_the_warm_up_of_erg_train(
    tmp_path: Path, keys: dict[str, Any], shown_as: str
) -> None:
    arguments = {"model_name_or_path": "builtin:tiny", "learning_rate": 0.001}
    axes = {"num_gpus": [1], "effective_batch_size": [4]}
    path = file(tmp_path, command="erg train", axes=axes, arguments=arguments, **keys)
    assert printed(plan(path)).splitlines()[2].rstrip().endswith(shown_as)


def test_five_thousand_cells_are_planned_in_the_time_of_a_few(tmp_path: Path) -> None:
    def took_s(number: int) -> float:
        path = file(tmp_path, axes={"x": list(range(number))})
        began = time.process_time()  # what others take of the machine is not in it
        made = plan(path, repeats=2)
        assert len(made.cells) == 2 * number
        return time.process_time() - began

    took_s(10)
    few_s, many_s = (min(took_s(number) for _ in range(3)) for number in (250, 2500))
    # Linear in the cells, with room for a busy machine: quadratic would be 100 times as long.
    assert many_s < 50 * max(few_s, 0.01)


def data(folder: Path, stanza: dict[str, Any], arguments: dict[str, Any]) -> BenchPlan:
    rows = [{"instruction": "Add 1 and 2.", "input": "", "output": "3"},
            {"instruction": "Name it.", "input": "A cat", "output": "Tom"}]  # fmt: skip
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    stanza = {"dataset_name": str(folder / "rows.jsonl"), **stanza}
    scenario = {"name": "a", "arguments": {"model_name_or_path": ["builtin:tiny"], **arguments}}
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"data_processing": stanza, "scenarios": [scenario]}))
    return plan(path, num_gpus=[1], effective_batch_size=[4])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_data_stage_gives_prompt_and_response(tmp_path: Path) -> None:
    made = data(tmp_path, {}, {"response_template": "\n### Response:"})
    said: list[str] = []
    datastage.prepare(made, tmp_path / "data", say=said.append)
    (job,) = made.settings["data"]
    first, second = lines(tmp_path / "data" / job["file"])
    assert first["prompt"].endswith("\n\n" + TEXT.format("Add 1 and 2."))
    assert first["response"] == "3"
    assert second["prompt"].endswith("\n\n### Input:\nA cat\n\n### Response:")
    assert second["response"] == "Tom"
    assert said == [f"data: 2 examples in {tmp_path / 'data' / job['file']}"]
    datastage.prepare(made, tmp_path / "data", say=said.append)
    assert len(said) == 1  # it is there
    config = yaml.safe_load(made.cells[0].filled(tmp_path / "exp_0").files["train.yaml"])
    assert config["data"]["train_path"] == str(tmp_path / "data" / job["file"])


def test_a_chat_template_and_a_part_of_the_data(tmp_path: Path) -> None:
    written = "{% for m in messages %}Q: {{ m['instruction'] }}\nA: {{ m['output'] }}{% endfor %}"
    stanza = {"chat_template": written, "response_template": "\nA:", "dataset_split": "train[1:]"}
    made = data(tmp_path, stanza, {})
    datastage.prepare(made, tmp_path / "data")
    (job,) = made.settings["data"]
    assert lines(tmp_path / "data" / job["file"]) == [
        {"prompt": "Q: Name it.\nA:", "response": "Tom"}
    ]


def test_data_without_the_answers_mark_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    made = data(tmp_path, {"response_template": "ANSWER"}, {})
    with pytest.raises(
        FormatError, match="example 1 of the data: response_template 'ANSWER' is not in its text"
    ):
        datastage.prepare(made, tmp_path / "data")
    assert list((tmp_path / "data").iterdir()) == []
    with pytest.raises(UsageError, match="no data at"):
        datastage.prepare(data(tmp_path, {"dataset_name": "./no.json"}, {}), tmp_path / "data")

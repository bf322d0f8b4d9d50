"""Commands by template: braces, the data's file, and which command holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ergmeter.bench.plan import data as datastage
from ergmeter.bench.plan.plan import plan
from ergmeter.bench.plan.scenarios import fill, template
from ergmeter.errors import UsageError

Erg = Callable[..., tuple[int, str, str]]
ROWS = [{"instruction": "Add 1 and 2.", "output": "3"}, {"instruction": "Name it.", "output": "T"}]


def file(folder: Path, **keys: Any) -> Path:
    scenario = {"name": "mine", "command": "run {x}", "arguments": {}, "axes": {"x": [1, 2]}}
    path = folder / "scenarios.yaml"
    path.write_text(yaml.safe_dump({"scenarios": [{**scenario, **keys}]}))
    return path


def started(text: str, folder: Path) -> list[str]:
    """The words that the first cell of a command starts with."""
    cell = plan(file(folder, command=text), repeats=2).cells[0]
    return list(cell.filled(folder / "exp_0").command)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("run {x} {seed}", "42"),
        ("run {x} {{seed}}", "{seed}"),
        ("run {x} {{{seed}}}", "{42}"),
        ("run {x} {{{{seed}}}}", "{{seed}}"),
        ("run {x} {{{x}}}", "{1}"),
        ("run {x} {{x}}", "{x}"),
        ("run {x} a{{run}}b", "a{run}b"),
        ("run {x} {{brace}}", "{brace}"),
        ("run {x} {{{{", "{{"),
        ("run {x} '{{\"a\": {seed}}}'", '{"a": 42}'),
    ],
)
def test_doubled_braces_are_braces_to_the_very_end(
    tmp_path: Path, written: str, meant: str
) -> None:
    assert started(written, tmp_path) == ["run", "1", meant]


def test_what_is_put_in_is_not_looked_at_again(tmp_path: Path) -> None:
    cell = plan(file(tmp_path, command="run {x} {out}")).cells[0]
    assert cell.filled(Path("/r/{seed}/exp_0")).command == ("run", "1", "/r/{seed}/exp_0")
    assert fill("{x}", {"x": "{{y}}"}) == "{{y}}"


def test_the_environment_has_braces_too(tmp_path: Path) -> None:
    variables = {"A": "{{seed}}", "B": "{seed}", "C": "{x}"}
    cell = plan(file(tmp_path, environment=variables)).cells[1]
    assert cell.filled(tmp_path).environment == {"A": "{seed}", "B": "42", "C": "2"}


def data(folder: Path, **stanza: Any) -> dict[str, Any]:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    mark = {"response_template": "### Response:"}
    return {"dataset_name": str(folder / "rows.jsonl"), **mark, **stanza}


def test_a_command_names_the_file_of_the_data_stage(tmp_path: Path) -> None:
    path = file(
        tmp_path, command="run {x} --data {training_data_path}", data_processing=data(tmp_path)
    )
    made = plan(path)
    datastage.prepare(made, tmp_path / "results" / "data")
    words = made.cells[0].filled(tmp_path / "results" / "exp_0").command
    assert words[:3] == ("run", "1", "--data")
    rows = [json.loads(line) for line in Path(words[3]).read_text().splitlines()]
    assert [row["response"] for row in rows] == ["3", "T"]
    assert len(made.settings["data"]) == 1  # for both cells


def test_a_command_that_wants_text_gets_it_in_one_field(tmp_path: Path) -> None:
    stanza = data(tmp_path, dataset_text_field="text", response_field="output")
    made = plan(file(tmp_path, command="run {x} {training_data_path}", data_processing=stanza))
    datastage.prepare(made, tmp_path / "data")
    (job,) = made.settings["data"]
    text = (tmp_path / "data" / job["file"]).read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert [list(row) for row in rows] == [["text"], ["text"]]
    assert rows[0]["text"].endswith("### Instruction:\nAdd 1 and 2.\n\n### Response: 3")


def test_data_that_reaches_no_command_is_refused_and_shared_data_not_made(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no \{training_data_path\} in it, so that data_proc"):
        plan(file(tmp_path, data_processing=data(tmp_path)))
    path = file(tmp_path)
    path.write_text(
        yaml.safe_dump({**yaml.safe_load(path.read_text()), "data_processing": data(tmp_path)})
    )
    made = plan(path)
    assert made.settings["data"] == []
    assert "training_data_path" not in made.cells[0].settings
    with pytest.raises(UsageError, match=r"\{training_data_path\} in the command .* not a setting"):
        plan(file(tmp_path, command="run {x} {training_data_path}"))


def test_the_command_that_is_asked_for_goes_before_the_files(erg: Erg, tmp_path: Path) -> None:
    path = file(tmp_path)
    asked = erg("bench", "plan", path, "--command", "walk {x} far", "--json")
    assert asked[0] == 0, asked[2]
    cells = json.loads(asked[1])["cells"]
    assert [cell["command"] for cell in cells] == [["walk", "1", "far"], ["walk", "2", "far"]]
    own = json.loads(erg("bench", "plan", path, "--json")[1])["cells"]
    assert [cell["command"] for cell in own] == [["run", "1"], ["run", "2"]]
    none = file(tmp_path, command=None, axes={}, arguments={"model_name_or_path": "builtin:tiny"})
    assert "train" in plan(none, max_seq_len=[64]).cells[0].command
    assert plan(none, otherwise="sft_trainer").cells[0].command[2] == "tuning.sft_trainer"
    code, _, said = erg("bench", "plan", path, "--command", "walk 'far")
    assert code == 2
    assert '--command "walk \'far": No closing quotation' in said


def test_a_command_of_fms_is_known_by_its_name_and_its_arguments() -> None:
    assert template("python -m tuning.sft_trainer {arguments}").workload == "sft_trainer"
    assert template("trl sft {arguments}").workload == "other"

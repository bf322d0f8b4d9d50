"""Configuration files: all errors at once, each with its line and the closest known key."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from ergmeter.config_file import ConfigModel, check, hint, read_yaml, usage_error, validate
from ergmeter.errors import UsageError


class Inner(ConfigModel):
    size: int = 1
    kind: Literal["small", "large"] = "small"


class Outer(ConfigModel):
    name: str = Field(description="the name of a run")
    inner: Inner = Inner()
    items: list[Inner] = Field(default_factory=list)


def written(folder: Path, text: str) -> Path:
    path = folder / "a.yaml"
    path.write_text(text)
    return path


def errors(folder: Path, text: str) -> list[str]:
    path = written(folder, text)
    with pytest.raises(UsageError) as raised:
        check(Outer, read_yaml(path))
    assert raised.value.exit_code == 2
    message = str(raised.value).removeprefix(f"{path}:")
    return sorted(line.strip() for line in message.splitlines() if line.strip())


def test_all_errors_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = "inner:\n  size: many\n  kind: lage\nitems:\n- size: 1\n- sise: 2\n"
    assert errors(tmp_path, text) == [
        "line 2: inner.size must be a whole number; got 'many'",
        "line 3: inner.kind must be one of small, large; did you mean large?; got 'lage'",
        "line 6: items[1].sise is no key; did you mean size?",
        "name is missing: the name of a run",
    ]


def test_null_stands_for_the_default(tmp_path: Path) -> None:
    model = check(Outer, read_yaml(written(tmp_path, "name: a\ninner: {size: null}\nitems:\n")))
    assert (model.inner.size, model.items) == (1, [])


def test_wrong_values_leave_the_rest_of_the_model(tmp_path: Path) -> None:
    values = read_yaml(written(tmp_path, "name: a\ninner: {size: x, kind: large}")).values
    model, found = validate(Outer, values)
    assert model is not None
    assert (model.inner.size, model.inner.kind) == (1, "large")
    assert [error.location for error in found] == [("inner", "size")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", ", line 2: 'name' is also in line 1; keep one"),
        ("name: [\n", ", line 2, column 1 is not YAML: "),
        ("- a\n", " must have keys and values; got ['a']"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as raised:
        read_yaml(path)
    assert str(raised.value).startswith(f"{path}{message}")


def test_an_alias_that_repeats_itself_has_a_line_at_little_cost(tmp_path: Path) -> None:
    levels = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9))
    found = errors(tmp_path, f"a0: &a0 [x]\n{levels}name: *a8\n")
    assert "line 1: a0 is no key; there are name, inner, items" in found
    assert any(line.startswith("line 10: name must be text; got [[[") for line in found)


def test_errors_of_one_kind_are_counted(tmp_path: Path) -> None:
    lines = ["line 1: a 'x' is wrong", "line 2: a 'y' is wrong", "line 3: b is wrong"]
    assert str(usage_error(tmp_path, lines)).splitlines()[1:] == [
        "  line 1: a 'x' is wrong (and 1 more like it)",
        "  line 3: b is wrong",
    ]


def test_a_hint_is_the_closest_name_or_all_of_them() -> None:
    assert hint("siez", ["size", "kind"]) == "did you mean size?"
    assert hint("zzz", ["size", "kind"]) == "there are size, kind"

"""Why the hook was not heard, as a user is told it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.recorder import hook


def announced(run: Path, *said: list[tuple[str, str]]) -> None:
    (run / hook.FOLDER).mkdir()
    for number, one in enumerate(said):
        lines = "".join(f"{name}\t{word}\n" for name, word in one)
        (run / hook.FOLDER / str(number)).write_text(lines)


def python(
    *attached: str, ergmeter: str = "yes", executable: str = "/opt/py", version: str = "3.11.7"
) -> list[tuple[str, str]]:
    said = [("executable", executable), ("version", version), ("ergmeter", ergmeter)]
    return said + [("attached", name) for name in attached]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["python", "-I", "a.py"], "with -I (isolated mode); run it without -I"),
        (["/usr/bin/python3.12", "-uE", "a.py"], "with -E"),
        (["python", "-B", "-S", "a.py"], "with -S"),
        (["python", "a.py", "-I"], "did not load the hook"),  # the program's own option
        (["python", "-m", "a", "-I"], "did not load the hook"),
        (["python", "-cIS"], "did not load the hook"),  # a program of two letters
        (["bash", "-c", "python -I a.py"], "no Python that loads the hook"),
    ],
)
def test_a_python_that_said_nothing_is_known_by_its_options(
    tmp_path: Path, command: list[str], said: str
) -> None:
    assert said in hook.why_no_steps(tmp_path, command)


def test_a_python_without_ergmeter_is_named_with_the_cure(tmp_path: Path) -> None:
    announced(tmp_path, python(ergmeter="no", executable="/my envs/py"))
    said = hook.why_no_steps(tmp_path, ["python"])
    assert "(cure: '/my envs/py' -m pip install ergmeter)" in said


def test_a_python_that_is_too_old_is_not_told_to_install_anything(tmp_path: Path) -> None:
    announced(tmp_path, python(ergmeter="no", version="3.8.10"))
    said = hook.why_no_steps(tmp_path, ["python"])
    assert "Python 3.8.10" in said
    assert "pip" not in said


def test_of_several_pythons_one_that_has_torch_says_more(tmp_path: Path) -> None:
    announced(tmp_path, python(ergmeter="no"), python("torch"), python())
    assert hook.why_no_steps(tmp_path, ["bash"]) == "no optimizer of torch stepped in it"


def test_a_hook_that_failed_says_so(tmp_path: Path) -> None:
    announced(tmp_path, python("torch", "ergmeter.integrations.lightning: ValueError: no"))
    assert "the hook failed in it (ergmeter.integrations.lightning: ValueError: no)" in (
        hook.why_no_steps(tmp_path, ["python"])
    )


def test_half_a_word_is_left_out(tmp_path: Path) -> None:
    announced(tmp_path, python())
    (tmp_path / hook.FOLDER / "9").write_text("execut")
    assert hook.why_no_steps(tmp_path, ["python"]) == "its Python loaded no torch"


def test_what_was_on_the_path_stays_on_it() -> None:
    first, *rest = hook.environment({"PYTHONPATH": "/a:/b"})["PYTHONPATH"].split(":")
    assert rest == ["/a", "/b"]
    assert Path(first, "sitecustomize.py").exists()
    assert hook.environment({"PYTHONPATH": ""})["PYTHONPATH"] == first

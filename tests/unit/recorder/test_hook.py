"""Why the hook was not heard, as a user is told it."""

from __future__ import annotations

from pathlib import Path

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


def test_where_no_python_loaded_the_hook_the_options_that_keep_it_out_are_named(
    tmp_path: Path,
) -> None:
    said = hook.why_no_steps(tmp_path)
    assert said.startswith("it started no Python that loads the hook")
    assert "Python with -I, -E or -S does not: remove that option" in said


def test_a_python_without_ergmeter_is_named_with_the_cure(tmp_path: Path) -> None:
    announced(tmp_path, python(ergmeter="no", executable="/my envs/py"))
    said = hook.why_no_steps(tmp_path)
    assert "(cure: '/my envs/py' -m pip install ergmeter)" in said


def test_a_python_that_is_too_old_is_not_told_to_install_anything(tmp_path: Path) -> None:
    announced(tmp_path, python(ergmeter="no", version="3.8.10"))
    said = hook.why_no_steps(tmp_path)
    assert "Python 3.8.10" in said
    assert "pip" not in said


def test_of_several_pythons_one_that_has_torch_says_more(tmp_path: Path) -> None:
    announced(tmp_path, python(ergmeter="no"), python("torch"), python())
    assert hook.why_no_steps(tmp_path) == "no torch optimizer stepped in it"


def test_a_hook_that_failed_says_so(tmp_path: Path) -> None:
    announced(tmp_path, python("torch", "ergmeter.integrations.lightning: ValueError: no"))
    assert "the hook failed in it (ergmeter.integrations.lightning: ValueError: no)" in (
        hook.why_no_steps(tmp_path)
    )


def test_half_a_word_is_left_out(tmp_path: Path) -> None:
    announced(tmp_path, python())
    (tmp_path / hook.FOLDER / "9").write_text("execut")
    assert hook.why_no_steps(tmp_path) == "its Python loaded no torch"


def test_what_was_on_the_path_stays_on_it() -> None:
    first, *rest = hook.environment({"PYTHONPATH": "/a:/b"})["PYTHONPATH"].split(":")
    assert rest == ["/a", "/b"]
    assert Path(first, "sitecustomize.py").exists()
    assert hook.environment({"PYTHONPATH": ""})["PYTHONPATH"] == first

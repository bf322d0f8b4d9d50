"""The training's YAML: keys, references between them, and what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ergmeter.errors import FormatError
from ergmeter.neuron.training_job import TrainingFile, Unresolved, read_training_file


def file_of(tmp_path: Path, text: str) -> TrainingFile:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    return read_training_file(path)


def test_a_reference_is_followed_from_the_top_and_from_beside_it(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        "data: {seq_length: '${model.length}'}\n"
        "model: {encoder: 4096, length: '${.encoder}', inner: {up: '${..encoder}'}}\n",
    )
    assert file.whole_number("data.seq_length", instead="-") == 4096
    assert file.whole_number("model.inner.up", instead="-") == 4096


def test_a_product_of_references_is_worked_out(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        "data: {global_batch_size: '${multiply:${.micro},${multiply:4,8}}', micro: 2}\n",
    )
    assert file.required("data.global_batch_size", instead="-") == 64


@pytest.mark.parametrize(
    "text", ["${a.b}", "${data.seq_length}", "${oc.env:LENGTH}", "${multiply:x,2}", "${", "${..x}"]
)
def test_what_can_t_be_followed_names_its_key_and_its_text(tmp_path: Path, text: str) -> None:
    file = file_of(tmp_path, f"data: {{seq_length: '{text}'}}\n")
    assert isinstance(file.value("data.seq_length"), Unresolved)
    with pytest.raises(FormatError) as refused:
        file.required("data.seq_length", instead="pass --seq-len")
    said = str(refused.value)
    assert "data.seq_length" in said
    assert repr(text) in said
    assert "--seq-len" in said


def test_a_missing_key_is_named_with_what_to_do(tmp_path: Path) -> None:
    file = file_of(tmp_path, "data: {global_batch_size: null}\n")
    for key in ("data.global_batch_size", "data.seq_length", "trainer.devices"):
        assert file.whole_number(key, instead="-") is None
        with pytest.raises(FormatError, match=f"the key {key} is missing; add it, or pass --x"):
            file.required(key, instead="pass --x")


@pytest.mark.parametrize("value", ["0", "-4", "2.5", "many", "true", "[1]", ".nan", "1e300"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    file = file_of(tmp_path, f"data: {{seq_length: {value}}}\n")
    with pytest.raises(FormatError, match=r"data\.seq_length must be a whole number"):
        file.whole_number("data.seq_length", instead="-")


def test_a_whole_number_may_be_written_with_a_point(tmp_path: Path) -> None:
    assert file_of(tmp_path, "a: {b: 32.0}\n").whole_number("a.b", instead="-") == 32


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"a: [1", "is not YAML"), (b"- 1\n", "has no keys"), (b"\xff\xfe\x00", "can't be read")],
)
def test_a_file_that_is_none_is_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(FormatError, match=said) as refused:
        read_training_file(path)
    assert "\n" not in str(refused.value)
    with pytest.raises(FormatError, match="No such file"):
        read_training_file(tmp_path / "none.yaml")

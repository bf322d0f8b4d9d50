"""The pages "Five minutes from ... to ergmeter" of two originals, pasted into a shell."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import PYTHON, environment, quick

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("page", "section"),
    [
        ("from-efficientllm", "Two minutes: the same numbers"),
        ("from-training-monitor", "Two minutes: the same numbers"),
        ("from-training-monitor", "Two minutes: in the training"),
    ],
)
def test_what_a_page_has_is_printed(lab: Lab, page: str, section: str) -> None:
    """In a checkout, of which the pages need the examples. EfficientLLM's page needs no torch."""
    (lab.path / "examples").symlink_to(ROOT / "examples")
    _, _, text = (ROOT / "docs" / f"{page}.md").read_text().partition(f"## {section}\n")
    text, _, _ = text.partition("\n## ")
    (commands,) = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    (lines,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
    unneeded = ["torch", "transformers"] if page == "from-efficientllm" else []
    variables = quick("bitsandbytes", "sklearn", "peft", *unneeded)
    done = lab.run("bash", "-ec", commands, env=environment(PATH=path, **variables))
    assert done.returncode == 0, done.stderr.decode()
    printed = done.stdout.decode().splitlines()
    assert [line for line in lines.splitlines() if line not in printed] == []
    if section.endswith("training"):
        profiled = [line for line in printed if line.startswith("🔍")]
        assert profiled[0].startswith("🔍 步骤 0: MFU = 0.")
        how = re.compile(
            r"🔍 步骤 (\d+): MFU = \d\.\d{4} "
            r"\(FLOPs of the model's configuration; no profiler was run\)"
        )
        assert [how.fullmatch(line)[1] for line in profiled] == ["0", "5", "10"]  # type: ignore[index]

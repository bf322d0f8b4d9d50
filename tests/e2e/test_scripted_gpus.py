"""A whole measured run on GPUs whose true power is known, through the real NVML binding.

Each case is one program with a `Meter`, or under `erg record`, in a process of its own; the truth
is the integral of the scripted curve over the window that the summary itself names.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from ergmeter.runlog.reader import Run
from tests.e2e.conftest import ERG, PYTHON, TIMEOUT_S, environment, erg, reported
from tests.nvml.library import Fault, Gpu, Library, Mig, Script, build, default_uuid

pytestmark = pytest.mark.soak

# The script's time begins when all is imported, however long that took.
PROGRAM = """
import os, sys, time
from ergmeter import Meter
with open(os.environ["SCRIPTED_NVML"], "a") as script:
    print("epoch_ns", time.monotonic_ns(), file=script)
with Meter(sys.argv[1], probes=["nvml", "process"]) as meter:
    for _ in range(int(sys.argv[2])):
        with meter.step(tokens=1000):
            time.sleep(0.05)
"""
# Idle, then loads of two kinds; from 20 s before the epoch so that no edge is at the start.
HILL = [(0.0, 100.0), (2.0, 500.0), (4.0, 200.0)]
FLAT = 250.0


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return build(tmp_path_factory.mktemp("nvml"))


class Measured:
    """A run, its report, and the seconds since the script's epoch of its window."""

    def __init__(self, path: Path, epoch_ns: int) -> None:
        self.report = reported(path)
        steps = Run.open(path).steps() if Run.open(path).count("steps") else {}
        if not len(steps["start_ns"]):
            steps = Run.open(path).steps("output")
        self.start_s = (int(steps["start_ns"][0]) - epoch_ns) / 1e9
        self.end_s = (int(steps["end_ns"][-1]) - epoch_ns) / 1e9

    def value(self, key: str) -> float:
        found = self.report["readings"][key]
        assert "value" in found, found
        return float(found["value"])

    def holds(self, key: str, truth: float) -> bool:
        """Whether the truth and the figure are both in the interval that the figure states: a few
        percent wide, wider where readings came late because the machine had no time for them."""
        return self._is_true(key, self.report["readings"][key], truth)

    @staticmethod
    def _is_true(key: str, found: dict[str, Any], truth: float) -> bool:
        assert "value" in found, found
        low, high = found["low"], found["high"]
        assert low < truth < high, f"{key}: {low} to {high} does not hold {truth}"
        assert low <= found["value"] <= high, f"{key}: {found['value']} is outside {low} to {high}"
        assert high < 2 * low, f"{key}: {low} to {high} says nothing of {truth}"
        return True

    def reason(self, key: str) -> str:
        found = self.report["readings"][key]
        assert "missing" in found, found
        return str(found["missing"])

    def device(self, index: int, key: str) -> float:
        return float(self._of_device(index)[key]["value"])

    def device_holds(self, index: int, key: str, truth: float) -> bool:
        """The same of one device's figure."""
        return self._is_true(key, self._of_device(index)[key], truth)

    def _of_device(self, index: int) -> dict[str, Any]:
        found: dict[str, Any] = self.report["devices"][default_uuid(index)]["readings"]
        return found

    def joules(self, gpu: Gpu) -> float:
        return gpu.joules(self.start_s, self.end_s)


def measure(library: Library, path: Path, *gpus: Gpu, steps: int = 40, **more: str) -> Measured:
    told = library.environment(Script(gpus))
    subprocess.run(
        [PYTHON, "-c", PROGRAM, str(path), str(steps)],
        env=environment(**told, **more), check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    written = Path(told["SCRIPTED_NVML"]).read_text()
    return Measured(path, int(written.rpartition("epoch_ns")[2]))


def test_two_gpus_with_different_curves(library: Library, tmp_path: Path) -> None:
    gpus = Gpu(HILL, memory_bytes=3e9, busy_frac=0.9), Gpu(FLAT, memory_bytes=1e9, busy_frac=0.5)
    run = measure(library, tmp_path / "run", *gpus, steps=60)
    truth_j = sum(run.joules(gpu) for gpu in gpus)
    assert run.holds("energy.run_j", truth_j)
    assert run.report["readings"]["energy.run_j"]["basis"] == "measured"
    for index, gpu in enumerate(gpus):
        assert run.device_holds(index, "energy.run_j", run.joules(gpu))
    tokens = 60 * 1000
    assert run.holds("energy.joules_per_token", truth_j / tokens)
    assert run.holds("energy.mean_w", truth_j / (run.end_s - run.start_s))
    assert run.value("memory.device_peak_bytes") == pytest.approx(3e9)
    assert run.value("memory.device_mean_bytes") == pytest.approx(2e9)
    assert run.value("utilization.busy_frac") == pytest.approx(0.7)
    whole = run.value("throughput.tokens_per_s")
    assert run.value("throughput.tokens_per_s_per_device") == pytest.approx(whole / 2)


def test_a_gpu_that_is_lost_on_the_way(library: Library, tmp_path: Path) -> None:
    run = measure(library, tmp_path / "run", Gpu(FLAT), Gpu(HILL, lost_at_s=2.5), steps=60)
    said = run.reason("energy.run_j")
    assert "GPU is lost" in said
    assert default_uuid(1) in said
    assert "before the window does" in said
    # When its counter was refreshed is known to 50 ms at either end of 3 s: up to 3 %.
    assert run.device_holds(0, "energy.run_j", run.joules(Gpu(FLAT)))
    assert any("lost during the run" in note for note in run.report["notes"])
    assert run.value("throughput.tokens_per_s") > 0
    assert run.report["status"] == "finished"


def test_a_counter_that_is_reset(library: Library, tmp_path: Path) -> None:
    gpu = Gpu(FLAT, reset_at_s=1.0)
    run = measure(library, tmp_path / "run", gpu)
    assert run.holds("energy.run_j", run.joules(gpu))
    found = run.report["readings"]["energy.run_j"]
    assert found["basis"] == "derived"
    assert "counter was reset" in found["note"]


def test_no_counter(library: Library, tmp_path: Path) -> None:
    gpu = Gpu(HILL, no_energy=True)
    run = measure(library, tmp_path / "run", gpu, steps=60)
    assert run.holds("energy.run_j", run.joules(gpu))
    assert "no energy counter" in run.report["readings"]["energy.run_j"]["note"]


def test_a_counter_but_no_power(library: Library, tmp_path: Path) -> None:
    gpu = Gpu(FLAT, no_power=True)
    run = measure(library, tmp_path / "run", gpu)
    assert run.holds("energy.run_j", run.joules(gpu))
    assert "gives no power reading" in run.reason("energy.peak_w")


def test_neither_counter_nor_power(library: Library, tmp_path: Path) -> None:
    run = measure(
        library, tmp_path / "run", Gpu(FLAT, no_energy=True, no_power=True, busy_frac=0.4)
    )
    for key in ("energy.run_j", "energy.mean_w", "energy.joules_per_token", "energy.peak_w"):
        assert run.reason(key)
    assert "no energy counter" in run.reason("energy.run_j")
    assert run.value("utilization.busy_frac") == pytest.approx(0.4)


def test_a_counter_that_never_moves(library: Library, tmp_path: Path) -> None:
    gpu = Gpu(FLAT, frozen_energy=True)
    run = measure(library, tmp_path / "run", gpu)
    assert run.holds("energy.run_j", run.joules(gpu))
    assert "stood still" in run.report["readings"]["energy.run_j"]["note"]
    silent = measure(library, tmp_path / "other", Gpu(FLAT, frozen_energy=True, no_power=True))
    assert "stood still" in silent.reason("energy.run_j")


def test_a_sensor_that_reads_zero_watts(library: Library, tmp_path: Path) -> None:
    run = measure(library, tmp_path / "run", Gpu(0.0, frozen_energy=True))
    assert "0 W throughout" in run.reason("energy.run_j")


def test_check_finds_a_gpu_that_is_held_down_by_heat(library: Library, tmp_path: Path) -> None:
    hot = Gpu(FLAT, busy_frac=0.9, throttle=pynvml.nvmlClocksEventReasonHwThermalSlowdown)
    measure(library, tmp_path / "run", hot, steps=110)
    code, said, _ = erg("check", tmp_path / "run", "--json")
    (found,) = json.loads(said)
    (heat,) = [one for one in found["findings"] if one["check"] == "throttling"]
    assert heat["weight"] == "serious"
    assert "throttled by heat in 100 % of the readings" in heat["seen"]
    assert (code, found["is_fit"]) == (1, False)


def test_a_board_that_others_compute_on_too_has_no_energy_of_the_run(
    library: Library, tmp_path: Path
) -> None:
    gpus = (
        Gpu(FLAT, processes=[("self", 10**9), (1, 10**9)]),  # the first process of the machine
        Gpu(FLAT, processes=[(1, 10**9)]),  # not used by the run
    )
    run = measure(library, tmp_path / "run", *gpus)
    said = run.reason("energy.run_j")
    assert "other programs computed on" in said
    assert default_uuid(0) in said
    assert default_uuid(1) not in said
    assert run.device_holds(0, "energy.run_j", run.joules(gpus[0]))
    assert any("other programs computed on a GPU" in note for note in run.report["notes"])


def test_a_driver_that_hangs(library: Library, tmp_path: Path) -> None:
    """The power query of the GPU blocks for 30 s; the run goes on, and says so."""
    run = measure(library, tmp_path / "run", Gpu(FLAT, hang_s=(3.0, 30.0)), steps=190)
    assert any("nvml: has not answered" in note for note in run.report["notes"])
    assert run.reason("energy.run_j")
    assert run.value("steps.count") == 190
    assert run.value("memory.process_peak_bytes") > 0


@pytest.mark.parametrize(("visible", "index"), [("1", 1), (default_uuid(1), 1), ("0", 0)])
def test_only_the_gpus_a_program_sees_are_its(
    library: Library, tmp_path: Path, visible: str, index: int
) -> None:
    gpus = Gpu(100.0), Gpu(400.0)
    run = measure(library, tmp_path / "run", *gpus, CUDA_VISIBLE_DEVICES=visible)
    by_kind = {found["kind"]: device for device, found in run.report["devices"].items()}
    assert by_kind.keys() == {"self", "gpu", "process"}
    assert len(run.report["devices"]) == 3
    assert by_kind["gpu"] == default_uuid(index)
    assert run.holds("energy.mean_w", 100.0 if index == 0 else 400.0)


def test_of_several_visible_gpus_only_the_one_in_use_is_billed(
    library: Library, tmp_path: Path
) -> None:
    run = measure(library, tmp_path / "run", Gpu(100.0), Gpu(400.0, processes=[("self", 10**9)]))
    assert run.holds("energy.mean_w", 400.0)
    assert run.value("throughput.tokens_per_s_per_device") == run.value("throughput.tokens_per_s")
    (note,) = [note for note in run.report["notes"] if default_uuid(0) in note]
    assert note.startswith("not used by this run, so not in its energy, peak and device count: ")


def test_the_gpus_of_all_ranks_of_a_launcher_are_billed_and_no_others(
    library: Library, tmp_path: Path
) -> None:
    """This process is the launcher; the first rank is measured, the second just is there."""
    with subprocess.Popen([PYTHON, "-c", "input()"], stdin=subprocess.PIPE) as second:
        gpus = (
            Gpu(100.0, processes=[("self", 10**9)]),
            Gpu(400.0, processes=[(second.pid, 10**9)]),
            Gpu(50.0, processes=[(1, 10**9)]),
        )
        run = measure(library, tmp_path / "run", *gpus, LOCAL_WORLD_SIZE="2", LOCAL_RANK="0")
        second.communicate(b"\n")
    assert run.holds("energy.mean_w", 500.0)


def test_a_recorder_that_is_one_rank_of_several_bills_its_own_gpu(
    library: Library, tmp_path: Path
) -> None:
    with subprocess.Popen([PYTHON, "-c", "input()"], stdin=subprocess.PIPE) as second:
        gpus = [
            Gpu(100.0, processes=[("self", 10**9)]),
            Gpu(400.0, processes=[(second.pid, 10**9)]),
        ]
        epoch_ns = time.monotonic_ns()
        code = "import time\nfor i in range(40):\n time.sleep(.05)\n print(f'step={i} tokens=8')"
        subprocess.run(
            [ERG, "record", "--out", str(tmp_path / "run"), "--", PYTHON, "-c", code],
            env=environment(
                **library.environment(Script(gpus, epoch_ns=epoch_ns)), LOCAL_WORLD_SIZE="2"
            ),
            check=True, capture_output=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        second.communicate(b"\n")
    run = Measured(tmp_path / "run", epoch_ns)
    assert run.holds("energy.mean_w", 100.0)


def test_under_erg_record_a_plain_script_gets_joules_per_token(
    library: Library, tmp_path: Path
) -> None:
    gpu = Gpu(FLAT)
    epoch_ns = time.monotonic_ns()
    code = "import time\nfor i in range(40):\n time.sleep(.05)\n print(f'step={i} tokens=512')"
    subprocess.run(
        [ERG, "record", "--out", str(tmp_path / "run"), "--", PYTHON, "-c", code],
        env=environment(**library.environment(Script([gpu], epoch_ns=epoch_ns))),
        check=True, capture_output=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    run = Measured(tmp_path / "run", epoch_ns)
    assert run.holds("energy.run_j", run.joules(gpu))
    tokens = run.value("tokens.total")
    assert 30 * 512 <= tokens <= 39 * 512  # lines read with the first open the window with it
    assert run.holds("energy.joules_per_token", run.joules(gpu) / tokens)
    own = run.report["readings"]["overhead.cpu_frac"]
    assert "the recorder and its relay as whole processes" in own["note"]
    assert own["value"] > 0


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (Script([Gpu()], driver="440.33.01"), "older than 450.80.02"),
        (Script([Gpu()], init_error=pynvml.NVML_ERROR_NO_PERMISSION), "no permission"),
        (Script([Gpu()], init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), "not loaded"),
        (Script([]), "shows no GPU"),
    ],
    ids=["old driver", "no permission", "not loaded", "no GPU"],
)
def test_the_doctor_says_why_there_is_no_gpu_and_what_to_do(
    library: Library, script: Script, said: str
) -> None:
    found = examined(library, script)["probes"]["nvml"]
    assert not found["works"]
    assert said in found["reason"]


def examined(library: Library, script: Script) -> dict[str, Any]:
    done = subprocess.run(
        [ERG, "doctor", "--json"], env=environment(**library.environment(script)),
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_doctor_lists_what_a_gpu_can_say(library: Library) -> None:
    exclusive = pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS
    gpus = [Gpu(compute_mode=exclusive), Gpu(no_energy=True), Gpu(frozen_energy=True)]
    found = examined(library, Script(gpus))
    assert found["energy"]
    nvml = found["probes"]["nvml"]
    assert nvml["works"]
    first, second, third = nvml["devices"]
    assert {"power", "energy", "memory"} <= set(first["reads"])
    assert "energy" not in second["reads"]
    assert "energy" not in third["reads"]
    said = " ".join(nvml["warnings"])
    assert "exclusive_process" in said
    assert "no energy counter" in said
    assert "stood still" in said


def test_the_doctor_without_a_driver_names_the_cure() -> None:
    done = subprocess.run(
        [ERG, "doctor"], env=environment(COLUMNS="300"), capture_output=True, text=True,
        check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    if "-  nvml" in done.stdout:
        assert "install it" in done.stdout
    assert "process" in done.stdout


FIRST_MIG, SECOND_MIG = "MIG-11110000-aaaa-5bbb-8ccc-000000000001", "MIG-22220000-aaaa-5bbb-8ccc-2"
# Four boards: each draws, holds and does something else, so that a figure tells whose it is.
FOUR = (
    Gpu(110.0, memory_bytes=11e9, busy_frac=0.11, activity={"sm": 81.0, "tensor": 21.0}),
    Gpu(220.0, memory_bytes=22e9, busy_frac=0.22, activity={"sm": 82.0, "tensor": 22.0}),
    Gpu(330.0, memory_bytes=33e9, busy_frac=0.33, activity={"sm": 83.0, "tensor": 23.0}),
    Gpu(
        440.0,
        memory_bytes=44e9,
        instances=[
            Mig(1, 0, FIRST_MIG, memory_bytes=5e9),
            Mig(2, 0, SECOND_MIG, memory_bytes=[(0, 6e9), (2, 9e9)]),
        ],
    ),
)
LOOP = "import time\nfor i in range(60):\n time.sleep(.05)\n print(f'step={i} tokens=512')"


def recorded(library: Library, path: Path, *gpus: Gpu, **more: str) -> Measured:
    """`erg record` of a plain script that prints its steps."""
    epoch_ns = time.monotonic_ns()
    done = subprocess.run(
        [ERG, "record", "--out", str(path), "--quiet", "--", PYTHON, "-c", LOOP],
        env=environment(**library.environment(Script(gpus, epoch_ns=epoch_ns)), **more),
        capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Measured(path, epoch_ns)


@pytest.mark.parametrize(
    ("visible", "boards"),
    [
        ("2,0", [2, 0]),
        (f"{default_uuid(1)},GPU-00000002", [1, 2]),
    ],
    ids=["indices out of order", "a uuid and the start of one"],
)
def test_the_figures_are_those_of_the_gpus_the_program_sees(
    library: Library, tmp_path: Path, visible: str, boards: list[int]
) -> None:
    run = recorded(library, tmp_path / "run", *FOUR, CUDA_VISIBLE_DEVICES=visible)
    gpus = {id_: one for id_, one in run.report["devices"].items() if one["kind"] == "gpu"}
    assert gpus.keys() == {default_uuid(index) for index in boards}
    assert run.holds("energy.mean_w", sum(110.0 * (index + 1) for index in boards))
    for index in boards:
        assert run.device_holds(index, "energy.mean_w", 110.0 * (index + 1))
        assert run.device(index, "memory.device_peak_bytes") == 11e9 * (index + 1)
        assert run.device(index, "utilization.busy_frac") == pytest.approx(0.11 * (index + 1))
        assert run.device(index, "activity.sm_frac") == pytest.approx(0.81 + 0.01 * index)
        assert run.device(index, "activity.tensor_frac") == pytest.approx(0.21 + 0.01 * index)


@pytest.mark.parametrize(
    ("visible", "instance", "peak_bytes"),
    [
        (FIRST_MIG, FIRST_MIG, 5e9),
        (f"MIG-{default_uuid(3)}/2/0", SECOND_MIG, 9e9),
    ],
    ids=["uuid", "board and numbers"],
)
def test_a_mig_instance_has_its_own_memory_and_no_energy(
    library: Library, tmp_path: Path, visible: str, instance: str, peak_bytes: float
) -> None:
    run = recorded(library, tmp_path / "run", *FOUR, CUDA_VISIBLE_DEVICES=visible)
    gpus = [id_ for id_, one in run.report["devices"].items() if one["kind"] == "gpu"]
    assert gpus == [instance]
    assert run.value("memory.device_peak_bytes") == peak_bytes
    assert run.value("throughput.tokens_per_s") > 0
    for key in ("utilization.busy_frac", "activity.sm_frac"):
        assert "a MIG instance has no sensor of its own" in run.reason(key)
    assert instance in run.reason("energy.run_j")
    assert run.reason("energy.joules_per_token")


def test_in_a_container_that_was_given_one_gpu_it_is_number_0(
    library: Library, tmp_path: Path
) -> None:
    """NVML lists just that one there, whatever its number is outside."""
    third = Gpu(330.0, uuid=default_uuid(2), memory_bytes=33e9)
    run = recorded(
        library, tmp_path / "run", third, CUDA_VISIBLE_DEVICES="0", NVIDIA_VISIBLE_DEVICES="2"
    )
    assert run.device(2, "memory.device_peak_bytes") == 33e9
    assert run.holds("energy.mean_w", 330.0)


def on_idle_gpus(library: Library, path: Path, *gpus: Gpu, options: tuple[str, ...] = ()) -> Any:
    """The report of a program that computes on the CPU, under `erg record`."""
    told = library.environment(Script(gpus, in_use=False))
    subprocess.run(
        [ERG, "record", "--out", str(path), "--quiet", *options, "--", PYTHON, "-c", LOOP],
        env=environment(**told), capture_output=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    done = subprocess.run(
        [ERG, "report", str(path), "--json"],
        capture_output=True, text=True, check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_a_program_of_the_cpu_is_not_billed_the_idle_gpu_beside_it(
    library: Library, tmp_path: Path
) -> None:
    """Neither the program nor the recorder, which reads it by NVML, has a context there."""
    report = on_idle_gpus(library, tmp_path / "run", Gpu(77.0, memory_bytes=4e6))
    gpu = f"NVIDIA H200 [{default_uuid(0)}]"
    energy = report["readings"]["energy.run_j"]
    said = energy.get("missing") or energy["note"]  # of the CPU, where its counters can be read
    assert gpu in said
    assert "NVIDIA H200," not in energy.get("note", "")
    for key in ("energy.accelerator_j", "throughput.tokens_per_s_per_device"):
        assert f"{gpu} not used by this run" in report["readings"][key]["missing"]
    assert report["devices"][default_uuid(0)]["use"] == "unused"
    assert report["devices"][default_uuid(0)]["readings"] == {}
    assert any(note.startswith("not used by this run") and gpu in note for note in report["notes"])
    assert report["readings"]["throughput.tokens_per_s"]["value"] > 0


def test_a_gpu_whose_processes_are_not_listed_counts_and_is_derived(
    library: Library, tmp_path: Path
) -> None:
    silent = Gpu(77.0, faults=[Fault("processes", pynvml.NVML_ERROR_NOT_SUPPORTED)])
    report = on_idle_gpus(library, tmp_path / "run", silent)
    mean = report["readings"]["energy.mean_w"]
    assert (mean["value"], mean["basis"]) == (pytest.approx(77.0, rel=0.02), "derived")
    (note,) = [note for note in report["notes"] if note.startswith("whether this run used")]
    assert "the driver did not always list the processes on it" in note


def test_devices_counts_a_gpu_that_nobody_was_seen_on(library: Library, tmp_path: Path) -> None:
    gpus = Gpu(77.0), Gpu(70.0)
    report = on_idle_gpus(library, tmp_path / "run", *gpus, options=("--devices", "1"))
    mean = report["readings"]["energy.mean_w"]
    assert (mean["value"], mean["basis"]) == (pytest.approx(70.0, rel=0.02), "measured")

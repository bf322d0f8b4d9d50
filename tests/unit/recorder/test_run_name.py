"""What a recorded run is called."""

from __future__ import annotations

import shlex

import pytest

from ergmeter.recorder.record import run_name


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --config other.py", "train"),
        ("/usr/bin/python3.12 -u /home/me/train_gpt.py", "train_gpt"),
        ("python -X faulthandler -W ignore train.py", "train"),
        ("python -m x", "x"),
        ("python -u -m pkg.train --config a.py", "pkg.train"),
        ("python -um x", "x"),
        ("python3 -mx", "x"),
        ("python -c 'import train.py'", "python"),
        ("python -", "python"),
        ("python", "python"),
        ("torchrun --nproc-per-node 2 train.py", "train"),
        ("torchrun --nproc-per-node 2 -m pkg.train", "pkg.train"),
        ("python -m torch.distributed.run --nproc-per-node 2 train.py", "train"),
        ("python -m torch.distributed.run -m pkg.train", "pkg.train"),
        ("accelerate launch --num_processes 2 finetune.py --lr 1", "finetune"),
        ("accelerate launch -m pkg.train", "pkg.train"),
        ("uv run train.py", "train"),
        ("uv run --with torch python -m x", "x"),
        ("env CUDA_VISIBLE_DEVICES=1 OMP_NUM_THREADS=1 python -m x", "x"),
        ("numactl -m 0 python train.py", "train"),
        ("taskset -c 0-3 nice -n 5 python -m x", "x"),
        ("srun -m block python train.py", "train"),
        ("bash run.sh -m x", "run"),
        ("bash -c 'cd code && python -m x'", "x"),
        ("bash -c 'sleep 1'", "bash"),
        ("./train_gpt2cu -i data.bin", "train_gpt2cu"),
        ("litgpt pretrain --config a.yaml", "litgpt"),
    ],
)
def test_a_run_is_called_after_its_script_or_module(command: str, name: str) -> None:
    assert run_name(shlex.split(command)) == name

"""Runs a program of Megatron-LM as it is, with the two lines of EfficientLLM's metrics before it.

torchrun ... examples/megatron/pretrain.py /path/to/Megatron-LM/pretrain_gpt.py --num-layers 28 ...
"""

import runpy
import sys

from megatron_patch.efficientllm_metrics import measure_megatron

measure_megatron()

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")

"""HLO modules: what XLA and Neuron compile, and how many multiply-accumulates that is."""

from ergmeter.hlo.calls import Kernel
from ergmeter.hlo.count import count_bytes, count_file
from ergmeter.hlo.files import FileCount, count_files
from ergmeter.hlo.result import ModuleCount

__all__ = ["FileCount", "Kernel", "ModuleCount", "count_bytes", "count_file", "count_files"]

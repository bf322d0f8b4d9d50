"""NVIDIA GPUs: NVML, its hardware counters (GPM), MIG, DCGM."""

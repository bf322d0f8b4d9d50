"""The training-metrics calculator for Trainium: a job's YAML, its log and its compile cache.

It answers what `calculate_training_metrics.py` of nki-llama answers, from the same files, without
a Neuron machine: MFU, the share of NKI kernels in the compiled graphs, a score. Values are right by
default; in compatibility mode they are the original's, faults included, and the output lists them.
"""

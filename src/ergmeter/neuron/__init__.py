"""Training metrics of a Trainium job from its YAML, its log and its compile cache.

It computes what nki-llama's `calculate_training_metrics.py` (the original) computes: MFU, the NKI
share of compiled graphs, a score. It reads the same files and needs no Neuron machine. Values are
correct by default. In compatibility mode they are the original's with its faults, which are listed.
"""

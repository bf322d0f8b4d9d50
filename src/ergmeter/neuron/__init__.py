"""Training metrics of a Trainium job from its YAML, its log and its compile cache.

It computes what `calculate_training_metrics.py` of nki-llama computes, from the same files and
without a Neuron machine: MFU, the NKI share of the compiled graphs, a score. Values are correct by
default. In compatibility mode they are the original's, faults included, and the output lists these
faults.
"""

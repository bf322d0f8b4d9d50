"""FLOPs counted by running a model on tensors without data, here or in another process."""

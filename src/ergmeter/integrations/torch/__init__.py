"""Training loops of torch: optimizer steps, module calls, checkpoints, precision."""

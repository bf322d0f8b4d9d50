"""Training loops of torch: optimizer steps, module calls, saves, precision."""

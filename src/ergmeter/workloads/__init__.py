"""Real jobs to measure. torch is imported by the modules in here and by none below them."""

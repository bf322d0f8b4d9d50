"""Output of the commands that calculate: FLOPs, estimates, reference tables."""

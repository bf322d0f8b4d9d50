"""Commands for runs as files and for this machine: list, runs, export, doctor."""

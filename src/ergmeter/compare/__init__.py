"""Compares runs, ledger rows and jobs: entries, groups, verdicts, the Pareto front."""

"""Commands that compare: compare, bench, gate."""

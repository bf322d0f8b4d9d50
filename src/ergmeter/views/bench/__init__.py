"""Output of `erg bench`: plan, progress, report, comparison, pages."""

"""Output of `erg analyze` (Trainium): terminal, Markdown, HTML, comparison."""

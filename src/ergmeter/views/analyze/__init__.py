"""What `erg analyze` shows: console, page parts and Markdown."""

"""Runs as files: labels, copies, packs, anonymised copies, collecting from elsewhere."""

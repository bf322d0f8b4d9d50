"""Renders a document as JSON: its data."""

from __future__ import annotations

import json

from ergmeter.views.document import Document
from ergmeter.views.documents import finite


def json_text(document: Document) -> str:
    """Return a document's data as JSON; NaN and infinity, which it lacks, are null."""
    return json.dumps(finite(document.data), indent=1, allow_nan=False)

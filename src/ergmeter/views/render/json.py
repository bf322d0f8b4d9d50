"""Renders a document as JSON: its data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ergmeter.views.document import Document


def json_text(document: Document) -> str:
    """Return a document's data as JSON, which has no NaN."""
    return json.dumps(document.data, indent=1, allow_nan=False)

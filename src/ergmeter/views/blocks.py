"""Names of `views.render.markdown` for views that are not documents yet."""

from ergmeter.views.render.markdown import escaped, markdown_table

__all__ = ["escaped", "markdown_table"]

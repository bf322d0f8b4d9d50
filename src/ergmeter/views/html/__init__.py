"""Templates, style and scripts of HTML pages, which `views.render.html` fills."""

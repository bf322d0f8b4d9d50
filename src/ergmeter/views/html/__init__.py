"""The frame of all HTML pages: style, scripts and chart data in one file."""

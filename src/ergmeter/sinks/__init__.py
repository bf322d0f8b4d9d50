"""Where the figures go while a run is measured: one file a tool that people look at."""

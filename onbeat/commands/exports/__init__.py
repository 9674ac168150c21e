"""The commands `export` and `verify`, on a run folder or on a stack that runs."""

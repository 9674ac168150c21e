"""The commands `export`, `verify`, `samples` and `replay`, on a run folder or on a stack that runs."""

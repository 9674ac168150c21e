"""The commands `export`, `verify` and `samples`, on a run folder or on a stack that runs."""

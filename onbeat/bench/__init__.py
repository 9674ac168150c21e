"""`onbeat bench`: the scripts of benchmarks/, which only a clone has."""

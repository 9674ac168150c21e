"""One script for each number of docs/benchmarks.md: `python -m benchmarks NAME`. Results are in benchmarks/results/."""

"""One script for each number of docs/benchmarks.md: `onbeat bench NAME`. Results lie in benchmarks/results/."""

"""One script for each number in the README: `onbeat bench NAME`. Results lie in benchmarks/results/."""

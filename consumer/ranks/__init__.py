"""What trains a job's batches, as the loop sees it: this process, its threads, or ranks that an extra brings."""

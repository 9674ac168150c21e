"""What a job keeps of its trained batches: the records on disk, where they stand, and how HTTP shows them."""

"""Views that endpoints answer: a recorded batch, the batches that were given up, the whole stack."""

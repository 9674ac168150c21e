"""Random faults on a real stack, and what must be true after them."""

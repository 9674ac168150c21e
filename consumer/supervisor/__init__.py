"""Which jobs get a trainer here, and the process that each of them is: no torch."""

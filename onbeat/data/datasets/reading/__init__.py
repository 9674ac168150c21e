"""The rows of one file: its lines, what a row says, and why one is refused."""

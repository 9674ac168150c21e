"""What the command line asks of a gateway."""

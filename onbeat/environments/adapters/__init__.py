"""Environments that are built in: one module each, which imports its package when it is used."""

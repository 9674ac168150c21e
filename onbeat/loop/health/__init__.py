"""Reads a job's health off the numbers of its iterations: a table of rules, each with the cure."""

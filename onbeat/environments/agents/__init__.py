"""Agents that own their loop: the door that their client talks to, and the environment that each of them becomes."""

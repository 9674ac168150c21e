"""Data that generators, trainers and scorers share: prompts, data sets, rendering, sampled values."""

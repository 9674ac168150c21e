"""The way of a prompt batch to a published rollout batch: sampling, turns of an environment, scores, publication."""

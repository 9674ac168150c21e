"""Export of a model from a run folder (`onbeat export`): the version is chosen, checked, and written as a model."""

"""Says what a job will meet with a model's folder, by the trials of a trainer and of a generator, made beforehand."""

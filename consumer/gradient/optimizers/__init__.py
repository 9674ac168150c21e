"""The optimizers of a trainer, a file each: `optimizer.type`."""

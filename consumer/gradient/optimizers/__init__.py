"""Optimizers of a trainer beside AdamW: `optimizer.type`."""

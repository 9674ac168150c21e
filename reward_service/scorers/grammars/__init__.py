"""Texts that a model wrote, read by grammars that are linear and evaluate nothing."""

"""Brings models and data sets of the Hugging Face hub onto this host, whole and checked, at a commit.

Consumes: names of the hub in specs and commands. Waits for: the hub, by huggingface_hub, in a process of its own.
Unblocked by: `onbeat fetch`, or a submission. Produces: folders below `hub_root`, which SpecRoot leads names to.
"""

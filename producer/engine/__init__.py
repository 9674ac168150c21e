"""Engines: one prompt batch in, its completions out, under weights whose digest was verified.

Consumes:     PromptBatch, and the weight files that a WeightManifest names.
Waits for:    its own compute thread only.
Unblocked by: `load_weights`; an engine without verified weights generates nothing.
Produces:     Completion[k][G] with the log-probs of the distribution sampled from, and VerifiedWeights.
"""

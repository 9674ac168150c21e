"""The terms that a loss is the sum of: `TERMS` in table.py has their order, and base.py what a term is.

Consumes:     what the models give to the sampled tokens of one pass.
Waits for:    nothing; a term is a function of tensors.
Unblocked by: nothing.
Produces:     a loss for each token, and the sums that the term's metrics are made of.
"""

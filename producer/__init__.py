"""A generator: prompts in, complete and scored rollout batches out.

Consumes:     PromptBatch and WeightManifest (weight registry) of the active jobs, through the broker.
Waits for:    a claimable prompt batch; the reward service, once a batch is sampled; under a lag, the next version too.
Unblocked by: an opened iteration, or another generator's expired lease.
Produces:     RolloutBatch through the fence, or a failure with its reason; never a batch without its rewards (I6).
"""

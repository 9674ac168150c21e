"""A library: messages of a conversation to token ids, and what a model sampled to its message. It imports no torch.

Consumes:     an environment's messages and tools, the tokens of a turn, the model's own tokenizer and chat template.
Waits for:    nothing; all of it is a function of what it is given (I7).
Unblocked by: nothing.
Produces:     prompts, messages, and the tokens of observations; those before them stay as they are (I9).
"""

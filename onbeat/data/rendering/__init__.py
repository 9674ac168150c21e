"""A library: messages of a conversation to token ids, and what a model sampled to its message. It imports no torch.

Consumes:     messages and tools of a row or an environment, the tokens of a turn, the tokenizer and chat template.
Waits for:    the process of a chat template, with deadlines; all of it is a function of what it is given (I7).
Unblocked by: the template's text, its refusal, its process's death, or a deadline.
Produces:     prompts, messages, and the tokens of observations; those before them stay as they are (I9).
"""

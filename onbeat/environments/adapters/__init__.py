"""Built-in environments, a module each, which imports its package when it is used; answers.py helps them.

`agent` and `verifiers` are in onbeat/environments/agents/.
"""

"""Opens run folders whose stack is gone: a gateway over a Redis of a moment, which is told what the folders say."""

"""Commands that make jobs of a spec: one that only evaluates, those of a sweep."""

"""The devices that a stack computes on, and which of its processes sees which."""

"""Tools that environments offer to models."""

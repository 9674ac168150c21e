"""A prompt that goes through the model once for its whole group."""

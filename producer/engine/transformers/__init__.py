"""The embedded engine, over Hugging Face's models."""

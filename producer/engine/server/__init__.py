"""Engines behind an HTTP server that speaks OpenAI's completions."""

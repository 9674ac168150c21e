"""An engine behind a server that speaks the OpenAI API."""

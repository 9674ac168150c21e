"""Makes and revokes keys of the gateway, each with a name and a scope; the file has their hashes alone."""

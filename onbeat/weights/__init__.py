"""How a version of the weights gets from the trainer into the engines.

Rooms for encodings (delta, adapter) and for stores (files, objects); the store in Redis is chunks.py.

Consumes:     the trainer's tensors (`publication.py`); manifests, and shards that are announced early (`receiver.py`).
Waits for:    room in Redis, with a deadline; for files, nothing: a version is announced when it is whole.
Unblocked by: an operator who makes room.
Produces:     files or chunks and their WeightManifest; tensors in an engine, with the digest of what they hold (I2).
"""

"""Records that cross a process line: standard library and msgspec, no torch, no redis, no network.

The files that it reads and writes are those whose form it says: lines of a run folder, records, a checkpoint's state,
settings.

Consumes:     values built by producer, consumer, reward_service, gateway and onbeat.
Waits for:    nothing; every type is a frozen value, validated when it is built and when it is decoded.
Unblocked by: nothing.
Produces:     MessagePack bytes (`wire.encode`) that any client in any language can read, and the error tree.
"""

"""What crosses a process line, and nothing else: standard library and msgspec, no I/O, no torch, no redis.

Consumes:     values built by producer, consumer, reward_service, gateway and onbeat.
Waits for:    nothing; every type is a frozen value, validated when it is built and when it is decoded.
Unblocked by: nothing.
Produces:     MessagePack bytes (`wire.encode`) that any client in any language can read, and the error tree.
"""

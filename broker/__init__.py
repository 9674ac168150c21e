"""All the Redis of the project: the version fence, streams, leases, the job store, the audit chain.

Consumes:     contracts records from producer, consumer and gateway.
Waits for:    a Redis or Valkey server, with a deadline.
Unblocked by: entries on the streams that wake who can claim, and of rollouts.
Produces:     typed outcomes of the transitions in scripts/*.lua, each of which is safe to repeat.
"""

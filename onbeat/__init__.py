"""What a person types and imports, and below it what the services share.

`commands`, `client`, `stack` and `terminal` start the services as processes, and import none of them. The services
import the lower rooms: `loop`, `weights`, `prompts`, `environments`, `cage`, `process` and their like.

Consumes:     job specs from files and flags, and what the gateway answers over HTTP.
Waits for:    readiness of each service it started, and the events of the jobs it watches, each with a deadline.
Unblocked by: Redis PING, `/readyz` of the HTTP services, server-sent events.
Produces:     a running stack on loopback, submitted jobs, a verdict over the audit chain, figures, exit codes.
"""

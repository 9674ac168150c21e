"""The operator's command line and the embedded stack: it starts the services as processes, and imports none of them.

Consumes:     job specs from files and flags, and what the gateway answers over HTTP.
Waits for:    readiness of each service it started, and the events of the jobs it watches, each with a deadline.
Unblocked by: Redis PING, `/readyz` of the HTTP services, server-sent events.
Produces:     a running stack on loopback, submitted jobs, a verdict over the audit chain, figures, exit codes.
"""

"""What the HTTP services share: their port, who may ask, how long a client may take, and how an error is told.

Consumes:     connections and requests of clients.
Waits for:    heads, bodies and unread answers, each with a deadline.
Unblocked by: the client's bytes, or the deadline.
Produces:     requests that may be answered, and a Problem with a status for each error.
"""

"""The parts that the HTTP services share: port, keys, deadlines of clients, and the form of an error.

Consumes:     connections and requests of clients.
Waits for:    heads, bodies and unread answers, each with a deadline.
Unblocked by: the client's bytes, or the deadline.
Produces:     requests that may be answered, and a Problem with a status for each error.
"""

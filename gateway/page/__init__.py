"""The page of the gateway: the files that `make page` builds from page/, and how they are served.

Consumes:     requests for `/` and `/assets/`, without a key.
Waits for:    nothing: every file is read once.
Unblocked by: nothing.
Produces:     the built page, under a policy that runs no script but its own.
"""

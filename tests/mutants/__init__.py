"""Checks left out one by one: every guard of some modules, and every one-line guard of the Lua scripts.

Consumes:     the sources, and the tests that belong to them.
Waits for:    nothing outside this machine; `make mutants` takes some minutes on two cores.
Unblocked by: nothing.
Produces:     the guards whose absence no test notices; an error where `kept.py` does not list exactly these.
"""

"""Checks left out one by one: every guard of some modules, and every one-line guard of the Lua scripts.

Consumes:     the sources, and the tests that belong to them.
Waits for:    nothing outside this machine.
Unblocked by: nothing.
Produces:     the guards whose absence no test notices; an error where `kept.py` does not list exactly these.

The 571 guards took 138 minutes, added up, on two cores that had other work besides: half of that with two at once.
A mutant that hangs takes two minutes.
"""

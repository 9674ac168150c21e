"""Checks left out one by one: every guard of some modules, and every one-line guard of the Lua scripts.

Consumes:     the sources, and the tests that belong to them.
Waits for:    nothing outside this machine.
Unblocked by: nothing.
Produces:     the guards whose absence no test notices; an error where `kept.py` does not list exactly these.

The 449 guards take some 45 minutes of processor time: half an hour on two quiet cores, two hours on two that have three
times as much other work. A mutant that hangs takes two minutes.
"""

"""`onbeat setup`: makes the environment of an engine whose packages the trainer's environment doesn't have.

`environment` installs the pinned packages and this Onbeat, `self_test` runs a short job with it, `command` is what a
person types.
"""

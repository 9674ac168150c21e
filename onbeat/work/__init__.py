"""The worker: what claims leased work, keeps its leases, does it, and says that it lives.

A generator is the worker of prompt batches, a stage worker that of items of stages; `Producer` and `Stage` of one's own
(`onbeat.client`) keep their leases by the same table.
"""

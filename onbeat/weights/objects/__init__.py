"""Bytes that are named by their content, in an object store and in a cache of each host (contracts/settings.py).

put, get ─▶ blobs ─┬─▶ cache: a folder of this host ─▶ served: to other hosts
                   ├─▶ hosts: caches of others, by HTTP
                   └─▶ bucket: S3, GCS, Azure or a folder, by obstore
versions ─▶ blobs: a store of policy versions, `weights.transport = "object"`
"""

"""Environments on other machines: a server of environments (`server`) and its client (`remote`).

One process listens (`app`, `sessions`, `shards`) and runs no environment's code; its shards (`worker`)
are processes that do. `wire` is what client, listener and shard say to each other. `process` has what
the process of any server needs, the training service's too.
"""

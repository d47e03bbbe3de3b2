"""Ring 2: the engine: requests, blocks, scheduler, step, runner, its process and its client.

The server imports ``messages`` and ``client`` only, and neither imports JAX.
"""

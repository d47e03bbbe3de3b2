"""Ring 0: the contracts. Free of JAX, flax, transformers and fastapi, for every process."""

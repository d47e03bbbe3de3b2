"""Ring 0: the contracts. Imports no JAX, flax, transformers or fastapi, so that every process can."""

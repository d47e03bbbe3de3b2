"""Ring 1: operations: one public front each, its implementations, and a plain reference."""

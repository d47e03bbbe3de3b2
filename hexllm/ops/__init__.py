"""Ring 1: operations. One public front an op, a table of implementations, a plain reference each."""

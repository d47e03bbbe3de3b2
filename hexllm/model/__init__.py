"""Ring 1: the toolkit a model family is written with."""

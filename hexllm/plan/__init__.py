"""Ring 3: what a program would need and take on TPUs, from the TPU compiler and without a TPU."""

"""Agreement between ranks: one reduction of two integers, nothing else."""

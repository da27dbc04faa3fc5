"""Benchmarks, in ratios to peers of the same run; ``python -m benchmarks.calls`` runs one."""

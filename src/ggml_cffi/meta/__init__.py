"""Tensor parallelism: meta devices, and the split functions that say how tensors are cut."""

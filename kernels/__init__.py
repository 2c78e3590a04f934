"""Triton kernels, one file per operation; installed as `diffscore_fast.kernels`."""

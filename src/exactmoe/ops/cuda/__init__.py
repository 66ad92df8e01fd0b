"""Launchers of the run-time compiled CUDA kernels (sm_90)."""

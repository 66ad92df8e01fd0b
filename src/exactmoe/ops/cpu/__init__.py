"""Launchers of the CPU kernels: one public function a file, torch tensors in and out."""

"""Device code only: one folder a backend, one file an op."""

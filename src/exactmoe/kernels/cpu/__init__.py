"""Device code of the CPU: numba functions, and the dots as LLVM vector code. Launchers are in ops/."""

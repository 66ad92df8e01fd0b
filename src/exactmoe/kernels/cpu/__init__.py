"""Device code of the CPU: numba functions, and dots as LLVM vector code. Launchers: ops/cpu/."""

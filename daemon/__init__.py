"""syshaxd: the daemon that owns expert weights, memory pools, threads and kernels."""

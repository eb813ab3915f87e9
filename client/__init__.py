"""syshax: attach to syshaxd and have the routed experts of a model computed by this machine's CPUs."""

"""syshaxctl: verbs in `__main__`, what people see in `screens`. Everything goes through `syshax.control`."""

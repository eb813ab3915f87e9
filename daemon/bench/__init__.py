"""Measurements that need no running daemon: `syshaxd bench moe` and `syshaxd bench ring`."""

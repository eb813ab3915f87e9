"""The control API: HTTP and JSON over the Unix socket."""

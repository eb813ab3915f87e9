"""What is wrong or slow on this machine and around the caller: checks that need no daemon."""

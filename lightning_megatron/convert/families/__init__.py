"""Which model families are known? One module each, found by its ``FAMILY``; adding one touches no other file."""

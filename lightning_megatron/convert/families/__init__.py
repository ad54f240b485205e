"""Model families: one module each, found by its ``FAMILY``; adding one touches no other file."""

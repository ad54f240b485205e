"""Other programs, run in separate environments, that our checkpoint formats are compared with."""

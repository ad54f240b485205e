"""Programs of others, run in environments of their own, that our formats are compared with."""

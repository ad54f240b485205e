"""Model families, discovered from each module's ``FAMILIES``: adding a family changes no other file."""

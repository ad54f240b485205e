"""Model families, discovered from each module's ``FAMILIES``: adding a family changes no other file.

Tables of names, fields and defaults belong here. Imports the rest of ``convert`` and ``models.config``.
"""

"""Where files are: paths on disks and object stores, downloads from the Hugging Face hub, locks, atomic publication.

What any kind of output or input needs belongs here; what a checkpoint's files mean does not (``checkpoint/``).
Imports nothing but ``errors``.
"""

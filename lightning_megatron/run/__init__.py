"""The life of a run: checks before launch, launch, restarts, heartbeats, and the hooks to ``checkpoint/``.

What only a run has belongs here, as opposed to what it computes (``engine/``) and what it writes (``checkpoint/``).
Imports anything below ``MegatronStrategy``, which alone composes these parts.
"""

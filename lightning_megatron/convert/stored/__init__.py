"""What does a model look like at rest? One view of every format, from which each target is written."""

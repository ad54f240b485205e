"""Names of entries in a checkpoint that readers without the engine know, too."""

EMA = "optimizer.state.ema."
"""Before the name of a weight: its exponential moving average."""

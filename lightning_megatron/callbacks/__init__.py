"""What can be watched while a model trains? Lightning callbacks for speed, loss and perplexity."""

from lightning_megatron.callbacks.loss_curve import LossCurve
from lightning_megatron.callbacks.perplexity import PerplexityReport
from lightning_megatron.callbacks.throughput import ThroughputMonitor

__all__ = ["LossCurve", "PerplexityReport", "ThroughputMonitor"]

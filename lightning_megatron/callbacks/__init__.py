"""What can be watched while a model trains? Lightning callbacks for progress, speed, loss, perplexity and texts."""

from lightning_megatron.callbacks.loss_curve import LossCurve
from lightning_megatron.callbacks.perplexity import PerplexityReport
from lightning_megatron.callbacks.progress_line import ProgressLine
from lightning_megatron.callbacks.sample_text import SampleText
from lightning_megatron.callbacks.throughput import ThroughputMonitor

__all__ = ["LossCurve", "PerplexityReport", "ProgressLine", "SampleText", "ThroughputMonitor"]

"""Lightning callbacks, one idea a file.

They read a run through the strategy's public properties, and may import what is below it; nothing but ``strategy``,
``module`` and ``cli`` imports them.
"""

from lightning_megatron.callbacks.ema import EMA
from lightning_megatron.callbacks.harness_evaluation import HarnessEvaluation
from lightning_megatron.callbacks.loss_curve import LossCurve
from lightning_megatron.callbacks.perplexity import PerplexityReport
from lightning_megatron.callbacks.progress_line import ProgressLine
from lightning_megatron.callbacks.replica_check import ReplicaCheck
from lightning_megatron.callbacks.sample_text import SampleText
from lightning_megatron.callbacks.spike_guard import SpikeGuard
from lightning_megatron.callbacks.throughput import ThroughputMonitor
from lightning_megatron.callbacks.top_logits import TopLogitsWriter

__all__ = [
    "EMA",
    "HarnessEvaluation",
    "LossCurve",
    "PerplexityReport",
    "ProgressLine",
    "ReplicaCheck",
    "SampleText",
    "SpikeGuard",
    "ThroughputMonitor",
    "TopLogitsWriter",
]

"""What does a run cost? FLOPs, parameters and the peaks of devices, as pure arithmetic."""

"""What fills the places of Megatron-Core that Transformer Engine or Apex usually fill?

One small file per slot; ``table.py`` lists every change to the engine as rows, ``report.py`` says which filler is used
and why. Classes that a layer spec plugs in (``SDPAttention``, ``Norm``) need no patch; everything else is a row of
``table.patches(device_type)`` that is active while a strategy runs and undone afterwards.
"""

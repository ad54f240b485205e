"""Generation: which token is next, with a trained model on any layout.

Prompts, options, decoding and pipelined forward passes belong here. It may import ``steps`` and ``convert`` and what
lies below them, but not Lightning; ``callbacks``, ``module`` and ``cli`` import it.
"""

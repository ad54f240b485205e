"""Which errors can a user cause, and how are they worded?

Every message has three parts: the offending value, the rule it breaks, and the fix. The command line prints such an
error as one line and exits with code 2; everything else is a defect of ours and keeps its traceback.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, file or combination of the user's that cannot work."""


class DataError(ConfigError):
    """A dataset, tokenizer or corpus that is missing, damaged, foreign or too small."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, half-written, damaged, unsafe or of another model."""


class NonFiniteError(ConfigError):
    """A step whose loss or gradients are NaN or infinite; the weights are as they were before it."""


def divisors(number: int) -> list[int]:
    """All divisors of ``number`` in ascending order; they are the choices that a divisibility message offers."""
    return [d for d in range(1, number + 1) if number % d == 0]


def require_divides(divisor_name: str, divisor: int, dividend_name: str, dividend: int) -> None:
    """Raise unless ``divisor`` divides ``dividend``: the one wording of every divisibility rule.

    Args:
        divisor_name: The setting to change, as the user spells it, e.g. ``tp``.
        divisor: Its value.
        dividend_name: What it must divide, e.g. ``num_attention_heads``.
        dividend: Its value.

    Raises:
        ConfigError: "tp=3 does not divide num_attention_heads=16; choose tp from 1, 2, 4, 8, 16".
    """
    if divisor < 1 or dividend % divisor != 0:
        choices = ", ".join(str(d) for d in divisors(dividend))
        raise ConfigError(
            f"{divisor_name}={divisor} does not divide {dividend_name}={dividend}; choose {divisor_name} from {choices}"
        )

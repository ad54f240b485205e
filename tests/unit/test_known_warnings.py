"""Hidden warnings: those that no user can change, unless the user's own filters say otherwise."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest

from lightning_megatron.startup import hide_known_warnings

_NORM = ("Apex is not installed. Falling back to Torch Norm", "megatron.core.models.backends")


@pytest.mark.parametrize(
    ("message", "module", "filters", "is_shown"),
    [
        (*_NORM, (), False),
        (*_NORM, ("always",), True),
        # What a user has set in transformer_config_overrides.
        ("enable_cuda_graph is deprecated", "megatron.core.transformer.transformer_config", (), True),
    ],
)
def test_what_the_engine_repeats_is_hidden_unless_the_user_asks_for_it(
    message: str, module: str, filters: tuple[Any, ...], is_shown: bool
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for action in filters:
            warnings.simplefilter(action)
        hide_known_warnings()
        warnings.warn_explicit(message, UserWarning, "file.py", 1, module=module)
    assert bool(caught) == is_shown


def test_lightnings_advertisement_is_dropped_and_its_other_lines_are_not(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=log.name):
        log.info("💡 Tip: For seamless cloud uploads and versioning, try installing [litmodels]")
        for name in ("RichModelSummary", "ModelCheckpoint"):
            log.info(f"The following callbacks returned in `configure_callbacks` override those of the Trainer: {name}")
        log.info("GPU available: False")
    assert "GPU available: False" in caplog.text
    assert "litmodels" not in caplog.text
    assert "ModelSummary" not in caplog.text
    assert "override those of the Trainer: ModelCheckpoint" in caplog.text

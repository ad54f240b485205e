"""Hidden warnings: those that no user can change, unless the user's own filters say otherwise."""

from __future__ import annotations

import logging
import warnings

import pytest

from lightning_megatron.known_warnings import hide_known_warnings


def _shown(message: str, module: str, *filters: str) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for action in filters:
            warnings.simplefilter(action)  # type: ignore[arg-type]
        hide_known_warnings()
        warnings.warn_explicit(message, UserWarning, "file.py", 1, module=module)
    return bool(caught)


@pytest.mark.parametrize(
    ("message", "module", "is_shown"),
    [
        ("Apex is not installed. Falling back to Torch Norm", "megatron.core.models.backends", False),
        # What a user has set in transformer_config_overrides.
        ("enable_cuda_graph is deprecated", "megatron.core.transformer.transformer_config", True),
        ("`val_dataloader` has few workers", "lightning.pytorch.trainer", True),
    ],
)
def test_what_the_engine_repeats_is_hidden_and_nothing_else(message: str, module: str, is_shown: bool) -> None:
    assert _shown(message, module) == is_shown


def test_a_filter_of_the_users_own_keeps_precedence() -> None:
    assert _shown("Apex is not installed", "megatron.core.models.backends", "always")


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

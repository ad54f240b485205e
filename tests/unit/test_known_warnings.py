"""Hidden warnings: those that no user can change, unless the user's own filters say otherwise."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest

from lightning_megatron.startup import hide_known_warnings

_NORM = ("Apex is not installed. Falling back to Torch Norm", "megatron.core.models.backends")
# What a user has set in transformer_config_overrides.
_GRAPHS = ("enable_cuda_graph is deprecated", "megatron.core.transformer.transformer_config")


@pytest.mark.parametrize(("said", "filters", "shown"), [(_NORM, (), 0), (_NORM, ("always",), 1), (_GRAPHS, (), 1)])
def test_what_the_engine_repeats_is_hidden_unless_the_user_asks_for_it(
    said: tuple[str, str], filters: tuple[Any, ...], shown: int
) -> None:
    message, module = said
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        for action in filters:
            warnings.simplefilter(action)
        hide_known_warnings()
        warnings.warn_explicit(message, UserWarning, "file.py", 1, module=module)
    assert len(caught) == shown


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

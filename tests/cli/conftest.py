from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.corpus import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a small indexed dataset."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))

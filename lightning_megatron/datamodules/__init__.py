"""Data modules of ``Trainer``: samples of each kind of source, served alike at any layout."""

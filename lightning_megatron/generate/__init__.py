"""Generation: decoding with a trained model on any layout."""

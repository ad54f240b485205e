"""How does a trained model write? Decoding on any layout."""

"""What is learned? How a batch becomes microbatches, a forward pass and a loss."""

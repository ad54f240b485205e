"""From and to which formats? Hugging Face model families, each described by one table."""

"""With which tokens does a model learn: documents, tokenizers, indexed files, the order of samples, loaders."""

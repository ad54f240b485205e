"""With which tokens does a model learn: which documents, tokenizer, files, order of samples and loaders?"""

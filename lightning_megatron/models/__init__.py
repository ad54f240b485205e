"""Model configs, the translation to Megatron's config, and the model chunks of GPT, BERT and T5."""

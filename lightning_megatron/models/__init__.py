"""Model configs, the translation to Megatron's config, and the model chunks of GPT, BERT and T5.

What is computed belongs here: layers, initial weights, adapters, and whether a model fits a layout and settings.
Imports the engine, and never Lightning.
"""

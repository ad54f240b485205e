"""Models: their description in Megatron's words and the builders that turn it into layers."""

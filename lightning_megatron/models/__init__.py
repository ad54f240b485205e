"""What is computed? Model descriptions in Megatron's words and the builders that turn them into layers."""

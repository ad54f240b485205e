"""Drives Megatron-Core: process groups, pipeline schedule, optimizer, patches. Does not import Lightning."""

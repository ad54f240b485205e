"""Everything that drives Megatron-Core: groups, schedule, optimizer, patches. Nothing here imports Lightning."""

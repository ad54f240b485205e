"""What do files of ``torch.save`` hold? Read by a machine of ours that runs nothing they name."""

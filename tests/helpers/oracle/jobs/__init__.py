"""Programs that tests start as jobs of torch.distributed."""

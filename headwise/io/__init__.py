"""What lies on disks: places, readers that never run code, tensors at even addresses, writing whole or not at all."""

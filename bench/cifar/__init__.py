"""ResNets on CIFAR-10 from OFFRAMP_DATA: checkpoints converted to safetensors, images divided, bundles prepared."""

import torch

# Test machines have few cores, and several tests start processes.
torch.set_num_threads(1)

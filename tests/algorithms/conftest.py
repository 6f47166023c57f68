import torch

# The machines that run the tests have few cores, and several tests start processes of their own.
torch.set_num_threads(1)

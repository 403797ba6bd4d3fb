"""The network as a DeepSpeed pipeline of tensor-parallel layers."""
